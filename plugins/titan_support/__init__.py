"""What the titan plugins share: torchtitan models on a Monarch mesh of ranks. No plugin itself.

`driver side: mesh` · `rank side: actors, rank, module, publishing` · `both: architecture, cpu`
"""
