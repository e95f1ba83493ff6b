"""The examples that no other test runs."""

from __future__ import annotations

import re
import threading

import pytest
import serve
import three_gemms
import torch

import fp8compile


@pytest.mark.usefixtures("interpreted")
def test_three_gemms_are_those_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    three_gemms.main()
    line = r"^(\w+): ([\d.]+)% from float32, (\S+) from fp8compile$"
    found = re.findall(line, capsys.readouterr().out, re.M)
    assert [name for name, _, _ in found] == ["y", "dx", "dw"]
    assert all(2 < float(error) < 8 and float(apart) < 1e-6 for _, error, apart in found)


@pytest.mark.slow
@pytest.mark.feature("export")
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("interpreted")
def test_weights_reach_a_server_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    serve.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == serve.STEPS and all("has 6 tensors, all as sent" in line for line in lines)
    assert len({line.rpartition(" ")[2] for line in lines}) == serve.STEPS  # each step has changed the weight


@pytest.mark.feature("export")
def test_a_weight_that_arrives_otherwise_is_noticed() -> None:
    ours, theirs = torch.multiprocessing.Pipe()
    server = threading.Thread(target=serve.serve, args=(theirs,))
    server.start()
    for expected in (fp8compile.digest(torch.ones(2)), fp8compile.digest(torch.zeros(2))):
        ours.send(("0.weight", torch.ones(2), expected))
    assert [ours.recv(), ours.recv()] == [True, False]
    ours.send("stop")
    server.join(30)
