"""Hosts in network namespaces meet by torchrun's rendezvous, lose one another and go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fusionzoo.training import run_folder
from helpers.trainings import assert_same_run

ROOT = Path(__file__).parents[2]
EVERY = 3  # steps between two checkpoints
RUN = ["--data.name", "interactions", "--data.samples", "400", "--log", "none", "--device", "cpu"]
RUN += ["--train.epochs", "16", "--train.save_every", str(EVERY), "--train.log_every", "1"]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs the command ip (iproute2)"),
]


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two hosts, each a network namespace, and the cable between them."""

    key: str = field(default_factory=lambda: f"fz{os.getpid()}")
    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    def name(self, number: int) -> str:
        return f"{self.key}-{number}"

    def up(self) -> None:
        ends = [f"{self.key}e{number}" for number in (1, 2)]
        for number in (1, 2):
            ip("netns", "add", self.name(number))
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, end in enumerate(ends, start=1):
            inside = ("-n", self.name(number))
            ip("link", "set", end, "netns", self.name(number), "name", "eth0")
            ip(*inside, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip(*inside, "link", "set", device, "up")

    def down(self) -> None:
        for one in self.agents:
            kill(one)
        for number in (1, 2):
            ip("netns", "delete", self.name(number), check=False)  # the cable goes with its ends

    def unplug(self) -> None:
        ip("-n", self.name(1), "link", "set", "eth0", "down")

    def torchrun(self, number: int, options: str, run: list[str]) -> subprocess.Popen[str]:
        """Start one host's agent; both have one name, so it says who keeps the meeting place."""
        meet = "--rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29400 --rdzv-id x --nproc-per-node 1"
        meet += f" --rdzv-conf is_host={number == 1},last_call_timeout=3"
        meet += f" --local-addr 10.77.0.{number} {options}"
        inside = ["ip", "netns", "exec", self.name(number)]
        log = folder_of(run).parent / f"host-{number}-{len(self.agents)}.log"
        agent = torchrun(meet.split(), run, log, inside)
        self.agents.append(agent)
        return agent


def torchrun(
    options: list[str], run: list[str], log: Path, inside: Sequence[str] = ()
) -> subprocess.Popen[str]:
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--", "train.py", *run]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0" if inside else "lo"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/distributed.md says why
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=file, stderr=file)


def folder_of(run: list[str]) -> Path:
    return Path(run[run.index("--out") + 1])


def kill(agent: subprocess.Popen[str]) -> None:
    """Kill -9 the agent and, as if the power went, all that it started."""
    family = [agent.pid]
    for pid in family:
        children = Path(f"/proc/{pid}/task/{pid}/children")
        family += [int(x) for x in children.read_text().split()] if children.exists() else []
    for pid in family:
        if agent.poll() is None or pid != agent.pid:
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def lines(out: Path) -> int:
    log = out / "metrics.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


def wait_for(out: Path, count: int, agents: list[subprocess.Popen[str]]) -> None:
    """Wait until the run has logged so much."""
    until = time.monotonic() + 400
    while lines(out) < count:
        assert all(one.poll() is None for one in agents), logs(out)
        assert time.monotonic() < until, logs(out)
        time.sleep(0.01)


def logs(out: Path) -> str:
    return "\n".join(f"{x.name}: {x.read_text()[-3000:]}" for x in out.parent.glob("host-*.log"))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        try:
            made.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces do not work here: {error.stderr.strip()}")
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes on one host."""
    out = tmp_path_factory.mktemp("one") / "run"
    options = ["--standalone", "--nproc-per-node", "2"]
    done = torchrun(options, [*RUN, "--out", str(out)], out.parent / "host-1-0.log")
    assert done.wait(timeout=400) == 0, logs(out)
    return out


@pytest.mark.slow
def test_two_hosts_learn_what_two_processes_of_one_host_learn(
    hosts: Hosts, one_host: Path, tmp_path: Path
) -> None:
    run = [*RUN, "--out", str(tmp_path / "run")]
    agents = [hosts.torchrun(number, "--nnodes 2", run) for number in (1, 2)]
    assert [one.wait(timeout=400) for one in agents] == [0, 0], logs(tmp_path / "run")
    assert_same_run(one_host, tmp_path / "run")


@pytest.mark.slow
def test_a_host_that_dies_and_comes_back_loses_no_more_than_the_steps_since_the_last_checkpoint(
    hosts: Hosts, one_host: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = [*RUN, "--resume", "auto", "--out", str(out)]
    first, second = (hosts.torchrun(n, "--nnodes 2 --max-restarts 3", run) for n in (1, 2))
    wait_for(out, 20, [first, second])
    kill(second)
    saved = run_folder.read(out / "checkpoints" / "last.pt")["state"]["step"]
    reached = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert reached - saved <= EVERY
    again = hosts.torchrun(2, "--nnodes 2 --max-restarts 3", run)
    assert [one.wait(timeout=400) for one in (first, again)] == [0, 0], logs(out)
    assert_same_run(one_host, out)


@pytest.mark.nightly
def test_a_host_that_is_cut_off_is_left_behind(hosts: Hosts, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = [*RUN, "--dist.timeout", "8", "--resume", "auto", "--out", str(out)]
    elastic = "--nnodes 1:2 --max-restarts 3"
    first, second = (hosts.torchrun(number, elastic, run) for number in (1, 2))
    wait_for(out, 20, [first, second])
    hosts.unplug()
    assert first.wait(timeout=400) == 0, logs(out)
    said = (tmp_path / "host-1-0.log").read_text()
    assert "made by 2 processes, going on with 1" in said
    assert "an epoch had" in said
    assert json.loads((out / "metrics.json").read_text())["environment"]["processes"] == 1
