"""deltaloom: RL post-training whose every policy update is one atomic, replayable commit.

The four sub-packages are symbolic links to the folders at the repository root, so that the
source reads as four folders and installs as one package.
"""

__version__ = "0.1.0"
