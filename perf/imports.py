"""Time `import fusionzoo` against `import torch`, and `fusionzoo --help` against Python's own
start.

`python perf/imports.py`. Bars: import at most 1.1 times that of torch; --help under 1 s of
CPU time beyond `python -c pass`; `zoo` and `zoo info` under 0.5 s (the first round, which fills the
cache of facts, does not count).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from _timing import compare, interleaved


def run(command: tuple[str, ...]) -> None:
    """Run a command without its output."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Print one JSON line."""
    commands = {
        "start": (sys.executable, "-c", "pass"),
        "torch": (sys.executable, "-c", "import torch"),
        "fusionzoo": (sys.executable, "-c", "import fusionzoo"),
        "api": (sys.executable, "-c", "from fusionzoo import create_model, create_fusion, load"),
        "help": (sys.executable, "-m", "fusionzoo.cli", "--help"),
        "zoo": (sys.executable, "-m", "fusionzoo", "zoo"),
        "zoo_info": (sys.executable, "-m", "fusionzoo", "zoo", "info", "gmu"),
        "training": (sys.executable, "-c", "import fusionzoo.training.build"),
        "digits": (
            *(sys.executable, "-c"),
            "from fusionzoo import create_dataset; create_dataset('digits')",
        ),
        "train_help": (sys.executable, "-m", "fusionzoo.cli", "train", "--help"),
    }
    works = {name: lambda command=command: run(command) for name, command in commands.items()}
    times = interleaved(works, rounds=5)
    median = {name: statistics.median(spent) for name, spent in times.items()}
    print(
        json.dumps(
            {
                "benchmark": "imports",
                **{f"{name}_cpu_s": round(x, 3) for name, x in median.items()},
                "import_over_torch": compare(times["fusionzoo"], times["torch"]),
                "api_over_torch": compare(times["api"], times["torch"]),
                "help_beyond_start_s": round(median["help"] - median["start"], 3),
                "train_help_beyond_start_s": round(median["train_help"] - median["start"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
