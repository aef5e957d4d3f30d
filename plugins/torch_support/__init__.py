"""What the torch plugins share: bits and tensors, a small decoder, padding, sampling.

A support package, not a plugin. Its modules import torch; plugins import them when a component
is built, never when the plugin's own module is.
"""
