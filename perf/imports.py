"""Time `import fusionzoo` against `import torch`, and `fusionzoo --help` against Python's own
start.

`python perf/imports.py`. Bars: import at most 1.1 times that of torch; --help under 1 s of
CPU time beyond `python -c pass`; `zoo` and `zoo info` under 0.5 s (the first round, which fills the
cache of facts, does not count).
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys


def cpu_seconds(*command: str) -> float:
    """Run a command and return the CPU time, user and system, that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


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
    rounds = [{name: cpu_seconds(*command) for name, command in commands.items()} for _ in range(6)]
    median = {name: statistics.median(r[name] for r in rounds[1:]) for name in commands}
    print(
        json.dumps(
            {
                "benchmark": "imports",
                **{f"{name}_cpu_s": round(x, 3) for name, x in median.items()},
                "import_over_torch": round(median["fusionzoo"] / median["torch"], 3),
                "api_over_torch": round(median["api"] / median["torch"], 3),
                "help_beyond_start_s": round(median["help"] - median["start"], 3),
                "train_help_beyond_start_s": round(median["train_help"] - median["start"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
