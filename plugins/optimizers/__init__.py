"""Update rules over float32 master parameters."""
