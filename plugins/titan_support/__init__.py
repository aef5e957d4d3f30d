"""What the titan plugins share: torchtitan models on a Monarch mesh of ranks. No plugin itself.

Driver: `mesh`. Ranks: `actor`, `rank`, `module`, `publishing`, `schedule`. Both: `architecture`,
`cpu`, `names`, `state`, `work`.
"""
