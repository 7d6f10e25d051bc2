"""docs/distributed.md: its commands are understood, its scripts do what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fusionzoo.config import RunConfig, from_args, help_text

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
SCRIPTS = [block for block in BLOCKS if block.startswith("#!")]


def commands() -> list[str]:
    """Every command of the page that starts train.py, on one line."""
    lines = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]*train\.py [^`\n]*)`", PAGE)
    return [line.rstrip("'& ") for line in lines if "train.py " in line]


@pytest.mark.parametrize("line", commands())
def test_every_command_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.chdir(ROOT)
    start, _, flags = line.partition("train.py ")
    if not flags.startswith("--resume "):  # of a run that is not there
        assert from_args(RunConfig, shlex.split(flags)).data["name"] == "stamps"
    if "torchrun" in start:
        options = shlex.split(start.partition("torchrun ")[2])
        said = parse_args([*options, "train.py", *shlex.split(flags)])
        assert said.training_script_args == shlex.split(flags)


def test_every_setting_that_it_names_exists() -> None:
    known = set(re.findall(r"--[\w.]+", help_text(RunConfig)))
    named = re.findall(r"`(--(?:dist|train|optim)\.[\w.]+|--(?:resume|out|seed|log))\b", PAGE)
    assert len(named) > 15
    assert set(named) <= known


@pytest.mark.parametrize("script", SCRIPTS, ids=["srun", "srun torchrun"])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_slurm_script_queues_again_what_was_preempted(
    script: str, code: int, tmp_path: Path
) -> None:
    tools = {
        "scontrol": '[ "$1" = show ] && printf "a\\nb\\n" || echo "$*" >> requeued',
        "python": f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR" >> ranks; exit {code}',
        # Preempted: the batch shell gets its signal, and passes on another.
        "torchrun": f"[ {code} = 75 ] || exit {code}\n"
        "trap 'exit 1' TERM; kill -USR1 $BATCH; while :; do sleep 0.05; done",
        "srun": 'if [ "$1" = torchrun ]; then exec "$@"; fi\n'
        'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=0 "$@"; code=$?; done; exit $code',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.sbatch").write_text(script.replace("#!/bin/bash\n", "export BATCH=$$\n"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    env |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "[a-b]"}
    done = subprocess.run(["bash", "run.sbatch"], cwd=tmp_path, env=env, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == (code == 75)
    if "torchrun" not in script:
        assert (tmp_path / "ranks").read_text() == "0 2 0 a\n1 2 0 a\n"
