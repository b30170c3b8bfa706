"""One sweep as a process of its own: a kernel that fails takes nobody with it.

    python -m fold_kernels.tune '{"out": "tiles.json", "budget": 240, "dry": true, "layers": []}'

`lightning-fold tune` writes the request and is the command for people.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fold_kernels.tune.layers import DRY_LAYER, LAYERS, Layer
from fold_kernels.tune.machine import Budget
from fold_kernels.tune.run import tune


def main(words: list[str]) -> int:
    """Run the request and write the table; no layers stand for built-in ones."""
    request = json.loads(words[0])
    dry = request["dry"]
    layers = [Layer(**layer) for layer in request["layers"]]
    layers = layers or ([DRY_LAYER] if dry else list(LAYERS))
    table = tune(layers, Budget(request["budget"]), dry=dry)
    path = Path(request["out"])
    table.write(path)
    slower = [key for key, gain in table.gains.items() if gain < 1.0]
    if not dry:
        print(f"slower than what they replace, so never run: {', '.join(slower) or 'none'}")
    print(f"{path}: {len(table.gains)} kinds of calls, capability {table.capability}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
