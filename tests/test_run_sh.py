"""run.sh: which preset and how many processes it chooses, when it installs, and what its test command counts.

Each test runs a copy of run.sh in a folder of its own, with stand-ins for torch and the other packages that answer as
the machine under test would. Nothing is installed, fetched or trained.
"""
from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="needs bash")

FAKE_TORCH = """
import os
from types import SimpleNamespace
__version__ = os.environ.get("FAKE_TORCH", "2.13.0")
class cuda:
    is_available = staticmethod(lambda: cuda.device_count() > 0)
    device_count = staticmethod(lambda: int(os.environ.get("FAKE_GPUS", "0")))
    memory = int(float(os.environ.get("FAKE_GIB", "79.2")) * 2**30)
    get_device_properties = staticmethod(lambda gpu: SimpleNamespace(total_memory=cuda.memory))
    get_device_capability = staticmethod(lambda gpu: (int(os.environ.get("FAKE_CAPABILITY", "9")), 0))
"""
FAKE_HUB = """
import os
class HfApi:
    def dataset_info(self, name, timeout):
        if "FAKE_HUB" not in os.environ:
            raise OSError("unreachable")
"""
# A python without packages, until its "pip" has seen requirements.txt; requirements-dev.txt cannot be installed.
BARE_PYTHON = """#!/bin/sh
case "$*" in
"-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
"-m pip --version") [ ! -e no-pip ] ;;
"-m ensurepip") rm no-pip ;;
"-m pip "*dev.txt) exit 1 ;;
"-m pip "*) echo "$*" >>pip.log; while [ -e hold ]; do sleep 0.05; done; touch .venv/installed ;;
"- "*pytest*) exit 1 ;;
"- "*) cat >/dev/null; [ "$0" = .venv/bin/python ] && [ -e .venv/installed ] && echo 2.13.0+cpu 0 0 0 0 ;;
"-c import sys"*) exit "${TOO_OLD:-0}" ;;
--version) echo Python 3.9.1 ;;
esac
"""
# This Python with all packages, which says that it is an older one.
QUOTED = shlex.quote(sys.executable)
OLD_PYTHON = f"""#!/bin/sh
case "$1" in
-) shift; exec {QUOTED} -c "import sys; sys.version_info = (3, 10, 1); exec(sys.stdin.read())" "$@" ;;
--version) echo Python 3.10.1 ;;
*) exit 1 ;;
esac
"""


class Machine:
    """A folder with run.sh in it, on a pretended machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copy(ROOT / "run.sh", folder)
        self.write("modules/torch.py", FAKE_TORCH)
        self.write("modules/huggingface_hub.py", FAKE_HUB)
        for name in ("numpy", "scipy", "hypothesis"):
            self.write(f"modules/{name}.py", "")
        self.write("data/fineweb.py", "print('fetched')")
        self.write("bin/nvidia-smi", "#!/bin/sh\nexit 9\n", mode=0o755)

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def shards(self, folder: str, tokens: int, count: int = 1) -> None:
        for name in ["x_val_000000.bin", *(f"x_train_{i:06d}.bin" for i in range(1, count + 1))]:
            self.write(f"{folder}/{name}", "")
            os.truncate(self.folder / folder / name, 2 * tokens + 1024)  # sparse

    def start(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen:
        base = {key: os.environ[key] for key in ("HOME", "TMPDIR") if key in os.environ}
        base |= {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.folder / "modules"),
            "RUN_SH_DRY": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        command = [BASH, self.folder / "run.sh", *arguments]
        pipes = {name: subprocess.PIPE for name in ("stdout", "stderr")}
        environment = base | environment
        return subprocess.Popen(
            command, cwd=cwd or self.folder, env=environment, text=True, stdin=subprocess.DEVNULL, **pipes
        )

    def run(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def command(self, *arguments: str, **environment: str) -> str:
        """What run.sh would run, without the interpreter's path."""
        result = self.run(*arguments, **environment)
        assert result.returncode == 0, result.stderr
        lines = (" ".join(shlex.split(line)) for line in result.stdout.splitlines())
        return "\n".join(lines).removeprefix(sys.executable + " ")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_syntax():
    for script in ("run.sh", ".ci/run"):
        subprocess.run([BASH, "-n", str(ROOT / script)], check=True)
        assert os.access(ROOT / script, os.X_OK), f"{script} is not executable"


def test_token_counts_are_those_of_the_presets():
    import train_gpt
    script = (ROOT / "run.sh").read_text()
    for name in ("speedrun", "sprint"):
        assert int(re.search(rf"{name.upper()}_TOKENS=(\d+)", script)[1]) == train_gpt.PRESETS[name].train_tokens


def test_no_gpu_is_smoke(machine):
    machine.shards("data/fineweb10B", 100_000_000, 7)
    assert machine.command("--seed", "3") == "train_gpt.py --preset smoke --seed 3"
    assert "sees no GPU" in machine.run().stderr


def test_cpu_torch_beside_a_gpu_is_pointed_out(machine):
    machine.write("bin/nvidia-smi", "#!/bin/sh\necho GPU 0\n", mode=0o755)
    assert "CPU build" in machine.run().stderr


@pytest.mark.parametrize("gpus, capability, shards, expected", [
    (8, 9, 7, "-m torch.distributed.run --standalone --nproc_per_node=8 train_gpt.py --preset speedrun"),
    (3, 9, 7, "-m torch.distributed.run --standalone --nproc_per_node=2 train_gpt.py --preset speedrun"),
    (16, 10, 9, "-m torch.distributed.run --standalone --nproc_per_node=8 train_gpt.py --preset speedrun"),
    (1, 9, 5, "train_gpt.py --preset speedrun"),
    (1, 9, 4, "train_gpt.py --preset sprint"),
    (1, 8, 7, "train_gpt.py --preset sprint"),
    (7, 9, 1, "-m torch.distributed.run --standalone --nproc_per_node=4 train_gpt.py --preset sprint"),
    (1, 9, 0, "train_gpt.py --preset smoke-gpu"),
    (2, 7, 7, "train_gpt.py --preset smoke"),
])
def test_choice(machine, gpus, capability, shards, expected):
    if shards:
        machine.shards("data/fineweb10B", 100_000_000, shards)
    assert machine.command(FAKE_GPUS=str(gpus), FAKE_CAPABILITY=str(capability)) == expected


FAKE_DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 + device : 0; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device ? 12 : 80) << 30; return 0; }
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    "build, expected",
    [
        (
            "13.0",
            "preset sprint-small, 2 process(es): 500 M training tokens in data/fineweb10B; "
            "GPU memory of 12 GiB, sprint needs a card of 80 GB. 2 GPU(s)",
        ),
        ("14.0", "preset smoke, 1 process(es): torch sees no GPU. 0 GPU(s)"),
        (None, "preset smoke, 1 process(es): torch sees no GPU. 0 GPU(s)"),
    ],
)
def test_driver_is_asked_before_torch(machine, build, expected):
    """The least of both GPUs counts.
    torch has its say where the driver is older than its build, and a build for CPUs."""
    machine.shards("data/fineweb10B", 100_000_000, 5)
    machine.write("modules/torch/__init__.py", "raise ImportError('slow')" if build == "13.0" else FAKE_TORCH)
    machine.write("modules/torch/version.py", f"__version__ = '2.13.0+here'\ncuda = {build!r}")
    machine.write("driver.c", FAKE_DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"], cwd=machine.folder, check=True)
    said = machine.run(LD_LIBRARY_PATH=str(machine.folder)).stderr
    assert expected in said
    assert ("torch 2.13.0+here" in said) == (build == "13.0")


@pytest.mark.parametrize("gib, capability, shards, preset, reason", [
    (9.8, 8, 7, "smoke", "GPU memory of 9 GiB, sprint-small needs a card of 12 GB"),
    (11.6, 8, 7, "sprint-small", "sprint needs a card of 80 GB"),
    (11.6, 8, 0, "smoke-gpu", "sprint needs 94 M"),
    (15.5, 12, 7, "sprint-small", "GPU memory of 15 GiB"),
    (31.5, 12, 7, "sprint-small", "GPU memory of 31 GiB"),
    (47.5, 9, 7, "sprint-small", "GPU memory of 47 GiB"),
    (79.1, 8, 7, "sprint", "speedrun is for compute capability 9"),
    (79.1, 9, 7, "speedrun", "700 M training tokens"),
])
def test_memory_decides(machine, gib, capability, shards, preset, reason):
    if shards:
        machine.shards("data/fineweb10B", 100_000_000, shards)
    result = machine.run(FAKE_GPUS="1", FAKE_CAPABILITY=str(capability), FAKE_GIB=str(gib), FAKE_HUB="1")
    assert result.stdout.strip().endswith(f"train_gpt.py --preset {preset}")
    assert "fetched" not in result.stdout
    assert f"preset {preset}, 1 process(es): " in result.stderr
    assert reason in result.stderr


@pytest.mark.parametrize("name", ["speedrun", "sprint", "sprint-small"])
def test_memory_of_the_smallest_card_is_enough(name):
    """Where other programs hold half a GiB: for the state, what comes later, and one batch chunk at a time."""
    import torch

    import train_gpt
    preset = train_gpt.PRESETS[name]
    meta = train_gpt.Ranks(0, 1, torch.device("meta"))
    ops = replace(train_gpt.reference_ops(), names={"mlp": "bf16"})
    model = train_gpt.GPT(preset.model, ops, meta.device)
    most_tokens = max(stage.batch_tokens for stage in preset.stages)
    optimizer = train_gpt.Optimizer(model, preset.optimizer, meta, ops, most_tokens)
    state = sum(tensor.nbytes for tensor in optimizer.state().values())
    looked_up = [table for table in optimizer.dense if isinstance(table, train_gpt.LookupTable)]
    state += sum(table.grads.nbytes + table.present.nbytes for table in looked_up)  # places that a rank alone has, too

    gib = int(re.search(rf"{name.upper().replace('-', '_')}_GIB=(\d+)", (ROOT / "run.sh").read_text())[1])
    train_gpt.memory_plan(preset, ops, 0.95 * ((gib - 0.4) * 2**30 - state) - train_gpt.LATER_BYTES)

    # Gradients exist twice, but for tables; averaging takes four tensors as large as one;
    # sparse gradients are gathered.
    gradients = 2 * sum(item.weights.nbytes for item in (*optimizer.scalars, *optimizer.banks))
    gradients += sum(table.weights.nbytes for table in optimizer.dense)
    averaging = 4 * max(item.average.nbytes for item in optimizer.averaged)
    gathered = 2 * preset.model.width * most_tokens
    assert 0 < gradients + averaging + gathered <= train_gpt.LATER_BYTES


@pytest.mark.parametrize(
    "arguments, environment, lines",
    [
        (
            ["--seed", "3"],
            {},
            ["can run preset smoke (one to two minutes on two free CPU cores)", "next: ./run.sh --seed 3"],
        ),
        (
            ["--preset", "sprint", "--data=my texts"],
            {"FAKE_GPUS": "2"},
            ["can run preset sprint (on one H200 34 s ", "next: ./run.sh --preset sprint --data=my\\ texts"],
        ),
        (
            ["--preset", "sprint"],
            {},
            ["can run preset sprint (many hours here", "next: ./run.sh --preset sprint"],
        ),
        (
            [],
            {"FAKE_GPUS": "1"},
            [
                "can run preset smoke-gpu (20 steps",
                "next: ./run.sh",
                "without --check it asks the Hugging Face hub",
            ],
        ),
        (
            [],
            {"FAKE_GPUS": "1", "FAKE_GIB": "15.5"},
            [
                "can run preset smoke-gpu (20 steps",
                "next: ./run.sh",
                f"then: {sys.executable} data/fineweb.py fetch --shards 1",
            ],
        ),
    ],
)
def test_check_ends_with_what_to_type(machine, arguments, environment, lines):
    result = machine.run("--check", *arguments, **environment)
    assert result.returncode == 0
    assert "--check" in result.stdout
    found = result.stderr.splitlines()[-len(lines):]
    assert all(line in text for line, text in zip(lines, found))
    assert found[1] == f"run.sh: {lines[1]}"


def test_check_that_fails_says_so(machine):
    machine.write("train_gpt.py", "raise SystemExit(4)")
    result = machine.run("--check", RUN_SH_DRY="")
    said = result.stderr.splitlines()[-1]
    assert result.returncode == 4
    assert said.startswith("run.sh: preset smoke cannot run yet (exit code 4)")
    assert "It takes one to two minutes" in said
    shortened = machine.run("--check", "--length", "0.2", RUN_SH_DRY="").stderr.splitlines()[-1]
    assert "It takes at full length: one to two minutes" in shortened


@pytest.mark.parametrize("capability, gib, gpus, expected", [
    (9, 79.2, 1, "--preset sprint --capability 9.0 --regions"), (9, 79.2, 2, "--preset sprint --capability 9.0"),
    (12, 47.4, 1, "--preset sprint --capability 12.0"), (7, 79.2, 1, "nothing")])
def test_step_is_compiled_beside_the_trainer(machine, capability, gib, gpus, expected):
    """By a process whose failure and output nobody sees; regions only for one GPU, which has memory to spare."""
    machine.shards("data/fineweb10B", 100_000_000)
    machine.write("modules/torch/__init__.py", FAKE_TORCH)
    machine.write("modules/torch/distributed/run.py", "import runpy; runpy.run_path('train_gpt.py')")
    machine.write(
        "benchmarks/compile_ahead.py",
        "import sys; open('told', 'w').write(' '.join(sys.argv[1:])); print('seen'); sys.exit(1)",
    )
    machine.write("train_gpt.py", f"""
import time
from pathlib import Path
deadline = time.monotonic() + (30 if {capability} > 7 else 1)
while not (Path("told").exists() and Path("told").read_text()) and time.monotonic() < deadline:
    time.sleep(0.01)
print(Path("told").read_text() if Path("told").exists() else "nothing")
""")
    result = machine.run(
        "--preset",
        "sprint",
        RUN_SH_DRY="",
        FAKE_GPUS=str(gpus),
        FAKE_CAPABILITY=str(capability),
        FAKE_GIB=str(gib),
    )
    assert result.returncode == 0
    assert result.stdout == expected + "\n"
    assert "seen" not in result.stderr


@pytest.mark.parametrize("preset", ["speedrun", "sprint", "sprint-small"])
def test_missing_shards_are_said_once(machine, preset):
    """Eight ranks would each say it."""
    assert machine.command("--preset", preset, FAKE_GPUS="8") == f"train_gpt.py --preset {preset}"
    machine.shards("texts", 1000)
    assert "--nproc_per_node=8" in machine.command("--preset", preset, "--data", "texts", FAKE_GPUS="8")
    other = machine.command("--preset", "speedrun-webmix", FAKE_GPUS="8")
    assert "--nproc_per_node=8" in other, "its folder is another"


def test_explicit_options_win(machine):
    machine.shards("data/fineweb10B", 100_000_000, 7)
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=8 "
    assert machine.command("--preset", "sprint", FAKE_GPUS="8") == torchrun + "train_gpt.py --preset sprint"
    assert (
        machine.command("--seed", "1", "--preset=smoke-gpu", FAKE_GPUS="1")
        == "train_gpt.py --seed 1 --preset=smoke-gpu"
    )
    assert machine.command("--preset", "smoke", FAKE_GPUS="8") == "train_gpt.py --preset smoke", "128 wide: one process"


def test_variables_of_a_cluster_do_not_reach_one_process(machine):
    """The trainer would be one of ranks that nobody starts, and wait for the others, or leave the message to them."""
    machine.write("train_gpt.py", "import os\nprint(*sorted({'RANK', 'LOCAL_RANK', 'WORLD_SIZE'} & os.environ.keys()))")
    left = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node7", "MASTER_PORT": "29400"}
    for options in ([], ["--check"]):
        assert machine.run(*options, RUN_SH_DRY="", **left).stdout == "\n"


def test_a_saved_model_is_used_by_one_process(machine):
    machine.write("modules/tiktoken.py", "")
    assert machine.command("sample", "model", "--eval", FAKE_GPUS="8") == "sample.py model --eval"
    assert machine.command("sample", "my model", "Once upon") == "sample.py my model Once upon"
    assert machine.command("sample", "model", "tar -h shows") == "sample.py model tar -h shows"


NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}


def test_several_nodes_share_eight_processes(machine):
    begin = "-m torch.distributed.run"
    end = "train_gpt.py --preset sprint"
    for gpus, nodes, processes in ((8, 2, 4), (8, 4, 2), (1, 2, 1), (3, 2, 2), (8, 8, 1)):
        command = machine.command("--preset", "sprint", FAKE_GPUS=str(gpus), **NODE | {"NNODES": str(nodes)})
        where = f"--nnodes={nodes} --node_rank=1 --master_addr=first --master_port=29500"
        assert command == f"{begin} {where} --nproc_per_node={processes} {end}"
    assert "--nnodes=2" in machine.command(**NODE), "one process of the smoke preset on each"
    assert "--master_port=1234 " in machine.command(**NODE, MASTER_PORT="1234")


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("NNODES", "3", "NNODES: expected 1, 2, 4 or 8, found 3"),
        ("NODE_RANK", "2", "NODE_RANK: expected 0 to 1, found 2"),
        ("NODE_RANK", "", "NODE_RANK: expected 0 to 1, found none"),
        ("NODE_RANK", "-1", "NODE_RANK: expected 0 to 1, found -1"),
        ("MASTER_ADDR", "", "MASTER_ADDR: expected the address of node 0, found none"),
        *(
            ("MASTER_PORT", port, f"MASTER_PORT: expected 1 to 65535, found {port}")
            for port in ("x", "0", "-1", "65536", "999999")
        ),
    ],
)
def test_wrong_nodes(machine, name, value, told):
    result = machine.run(FAKE_GPUS="1", **NODE | {name: value})
    assert result.returncode == 2
    assert told in result.stderr.splitlines()[-1]
    assert "; fix: " in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("limit", ["x", "0", "-3", "1e3x"])
def test_wrong_limit_on_several_nodes(machine, limit):
    result = machine.run("--stall-limit", limit, FAKE_GPUS="1", **NODE)
    assert result.returncode == 2
    assert f"--stall-limit: expected seconds, found {limit}; fix: " in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("option", [["--data", "my texts"], ["--data=my texts"]])
def test_data_decides_where_it_is_counted(machine, option):
    machine.shards("my texts", 10_000_000, 10)
    assert machine.command(*option, FAKE_GPUS="1", FAKE_HUB="1") == f"train_gpt.py --preset sprint {' '.join(option)}"


def test_fetches_when_the_hub_answers(machine):
    assert machine.command(FAKE_GPUS="1", FAKE_HUB="1").splitlines() == [
        "fetched",
        sys.executable + " train_gpt.py --preset speedrun",
    ]
    assert "fetched" not in machine.command("--preset", "sprint", FAKE_GPUS="1", FAKE_HUB="1")
    assert "fetched" not in machine.command(FAKE_GPUS="1", FAKE_CAPABILITY="8", FAKE_HUB="1")
    machine.write("data/fineweb.py", "raise SystemExit(2)")
    assert machine.command(FAKE_GPUS="1", FAKE_HUB="1") == "train_gpt.py --preset smoke-gpu"
    machine.write("data/fineweb.py", "raise SystemExit(130)")
    assert machine.run(FAKE_GPUS="1", FAKE_HUB="1").returncode == 130, "Ctrl-C ends everything"


def test_a_venv_without_pip_is_completed(machine):
    """As an interruption leaves it; what else is in it stays."""
    for name in ("bin/python3", "bin/python", ".venv/bin/python"):
        machine.write(name, BARE_PYTHON, mode=0o755)
    for name in ("no-pip", ".venv/mine"):
        machine.write(name, "")
    result = machine.run("--seed", "1", PYTHON="python3")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ".venv/bin/python train_gpt.py --preset smoke --seed 1"
    assert (machine.folder / ".venv/mine").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_venv_whose_python_is_away_is_left_alone(machine, linked):
    """It may come back, and the folder may be another project's."""
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    folder = machine.folder / ("shared" if linked else ".venv")
    (folder / "bin").mkdir(parents=True)
    (folder / "mine").write_text("notes")
    if linked:
        (machine.folder / ".venv").symlink_to(folder)
    else:
        (folder / "bin/python").symlink_to("/nowhere/python3")
    result = machine.run(PYTHON="python3")
    assert result.returncode == 2
    assert ".venv: expected a Python that starts, found none in it; fix: " in result.stderr
    assert (folder / "mine").exists()


def test_installs_into_venv_once(machine):
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    for _ in range(2):
        result = machine.run("--seed", "1", PYTHON="python3")
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == ".venv/bin/python train_gpt.py --preset smoke --seed 1"
    assert (machine.folder / "pip.log").read_text().count("-r requirements.txt") == 1
    result = machine.run("test", "tests/test_x.py", PYTHON="python3")
    assert result.returncode == 2
    assert "requirements-dev.txt" in result.stderr
    assert "fix:" in result.stderr


def test_older_torch_is_not_used(machine):
    machine.write(".venv/bin/python", BARE_PYTHON, mode=0o755)
    machine.write(".venv/installed", "")
    assert machine.command(FAKE_TORCH="2.10.0") == ".venv/bin/python train_gpt.py --preset smoke"
    for version in ("2.11.0+cu130", "2.13.1", "2.16.0a0+git", "3.0.0"):
        assert machine.command(FAKE_TORCH=version) == "train_gpt.py --preset smoke"


def test_python_too_old(machine):
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    result = machine.run(PYTHON="python3", TOO_OLD="1")
    assert result.returncode == 2
    assert "expected Python 3.11 to 3.14, found Python 3.9.1" in result.stderr


def test_python_3_10_with_all_packages_is_not_used(machine):
    """It has torch, but the code needs 3.11: then run.sh says so in a line."""
    machine.write("bin/python3.10", OLD_PYTHON, mode=0o755)
    for name in ("python3", "python", "python3.11", "python3.12", "python3.13", "python3.14"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    result = machine.run(PYTHON="python3.10", TOO_OLD="1")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("run.sh: python3.10: expected Python 3.11 to 3.14, found Python 3.10.1; fix: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_newer_python_beside_an_old_one_is_found(machine):
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON.replace("${TOO_OLD:-0}", "1"), mode=0o755)
    machine.write("bin/python3.13", BARE_PYTHON, mode=0o755)
    result = machine.run(PYTHON="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == ".venv/bin/python train_gpt.py --preset smoke"


def test_help_installs_nothing(machine):
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    result = machine.run("--help", PYTHON="python3")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", result.stderr
    assert result.stdout.startswith("./run.sh [train_gpt.py options] ")
    assert "NNODES=2" in result.stdout
    assert "docs/options.md" in result.stdout.splitlines()[-1]
    assert not (machine.folder / ".venv").exists()
    assert not (machine.folder / "pip.log").exists()

    machine.write("train_gpt.py", "import sys; print('options of the trainer', sys.argv[1:])")
    out = machine.run("--seed", "1", "--help").stdout
    assert out.startswith("./run.sh [train_gpt.py options] ")
    assert out.endswith("options of the trainer ['--help']\n")
    assert "pytest options" in machine.run("test", "-h").stdout


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_in_a_fresh_clone_install_once(machine):
    for name in ("python3", "python"):
        machine.write(f"bin/{name}", BARE_PYTHON, mode=0o755)
    machine.write("hold", "")
    first = machine.start(PYTHON="python3")
    while not (machine.folder / "pip.log").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)

    second = machine.start(PYTHON="python3")
    assert second.stderr.readline() == "run.sh: another run.sh installs here: waiting for it\n"
    (machine.folder / "hold").unlink()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out.splitlines()[-1] == ".venv/bin/python train_gpt.py --preset smoke"
    assert (machine.folder / "pip.log").read_text().count("\n") == 1


def test_the_command_can_be_typed(machine):
    words = ["train_gpt.py", "--preset", "smoke", "--log-dir", "a b", "--save=$HOME"]
    assert shlex.split(machine.run(*words[1:]).stdout)[1:] == words


def test_a_link_and_a_search_path_lead_to_the_same_folder(machine, tmp_path_factory):
    """As of ~/bin, and for users whose shell looks for folders elsewhere first."""
    elsewhere = tmp_path_factory.mktemp("bin")
    (elsewhere / "run.sh").symlink_to(machine.folder / "run.sh")
    (elsewhere / machine.folder.name).mkdir()
    shell = [BASH, elsewhere / "run.sh", "--preset", "smoke"]
    environment = os.environ | {"RUN_SH_DRY": "1", "PYTHON": sys.executable}
    environment["PYTHONPATH"] = str(machine.folder / "modules")
    done = subprocess.run(shell, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith(" train_gpt.py --preset smoke\n"), done.stderr
    shell[1] = f"{machine.folder.name}/run.sh"
    environment["CDPATH"] = str(elsewhere)
    done = subprocess.run(shell, cwd=machine.folder.parent, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith(" train_gpt.py --preset smoke\n"), done.stderr


def test_a_shard_that_leads_nowhere_is_for_the_trainer_to_say(machine):
    machine.shards("texts", 1000)
    (machine.folder / "texts/x_train_000002.bin").symlink_to("nowhere")
    assert machine.command("--preset", "smoke", "--data", "texts") == "train_gpt.py --preset smoke --data texts"


def test_paths_mean_the_folder_where_they_were_typed(machine, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("else where")
    typed = ["--preset", "smoke", "--data", "texts", "--save=model.safetensors", "--log-dir", "/abs"]
    def found(*typed, **environment):
        return " ".join(shlex.split(machine.run(*typed, cwd=elsewhere, **environment).stdout))

    expected = [
        "--preset", "smoke", "--data", f"{elsewhere}/texts",
        f"--save={elsewhere}/model.safetensors", "--log-dir", "/abs",
    ]
    assert found(*typed) == " ".join([sys.executable, "train_gpt.py", *expected])
    assert machine.command(*typed) == " ".join(["train_gpt.py", *typed]), "from its own folder as they are"

    (elsewhere / "env").mkdir()
    (elsewhere / "env/python").symlink_to(sys.executable)
    assert found("--preset", "smoke", PYTHON="env/python").startswith(f"{elsewhere}/env/python train_gpt.py ")

    machine.write("modules/tiktoken.py", "")
    for name in ("model", "once"):
        (elsewhere / name).touch()
    typed = "sample", "model", "once", "--export", "copy"
    expected = [sys.executable, "sample.py", f"{elsewhere}/model", "once", "--export", f"{elsewhere}/copy"]
    assert found(*typed) == " ".join(expected), "a text may be a file's name too"
    typed = "sample", "--encoding", "once", "--seed", "once", "model"
    expected = [
        sys.executable, "sample.py", "--encoding", f"{elsewhere}/once", "--seed", "once", f"{elsewhere}/model",
    ]
    assert found(*typed) == " ".join(expected), "an option's value is no model"
    expected = [sys.executable, "sample.py", "--", f"{elsewhere}/model", "once"]
    assert found("sample", "--", "model", "once") == " ".join(expected), "what ends the options has no value"

    (elsewhere / "test_mine.py").write_text("def test_1(): pass\n")
    (elsewhere / "test_1").touch()
    result = machine.run("test", "test_mine.py::test_1", "-k", "test_1", cwd=elsewhere)
    assert result.stdout.splitlines()[-1] == "1 passed, 0 failed, 0 skipped", result.stdout + result.stderr
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine/test_more.py").write_text("def test_2(): pass\ndef test_3(): pass\n")
    result = machine.run("test", "../" + elsewhere.name + "/mine", cwd=elsewhere)
    assert result.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped", result.stdout + result.stderr

    machine.write("here", "")
    (elsewhere / "here").unlink(missing_ok=True)
    assert found("sample", "here").endswith(f" sample.py {elsewhere}/here"), "not the one beside run.sh"


def test_options_with_paths_choose_no_files(machine):
    machine.write("tests/test_a.py", "def test_1(): pass\ndef test_2(): pass\n")
    machine.write("tests/test_b.py", "def test_3(): assert False\n")
    for options in (["--deselect=tests/test_b.py::test_3"], ["--deselect", "tests/test_b.py::test_3"]):
        result = machine.run("test", *options)
        found = result.returncode, result.stdout.splitlines()[-1]
        assert found == (0, "2 passed, 0 failed, 0 skipped"), result.stdout


def test_counts_tests_of_all_processes(machine):
    machine.write(
        "tests/test_a.py",
        "import pytest\ndef test_1(): pass\ndef test_2(): pass\n@pytest.mark.skip\ndef test_3(): pass\n",
    )
    machine.write("tests/test_b.py", "import os\nos.environ['TRITON_INTERPRET'] = '1'\ndef test_4(): pass\n")
    machine.write("tests/test_c.py", "import os\ndef test_5(): assert 'TRITON_INTERPRET' not in os.environ\n")
    result = machine.run("test")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "4 passed, 0 failed, 1 skipped"), (
        result.stdout + result.stderr
    )
    assert "1 file(s) in a process of their own" in result.stderr

    parametrized = "import pytest\n@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_6(x): pass\n"
    machine.write("my tests/test_d.py", parametrized)
    for chosen, passed in (("my tests/test_d.py", 2), ("my tests/test_d.py::test_6[a b]", 1)):
        result = machine.run("test", chosen)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (0, f"{passed} passed, 0 failed, 0 skipped")

    result = machine.run("test", "tests/test_a.py::test_1", "-k", "test_1")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    machine.write("test_1/test_e.py", "def test_7(): pass\n")
    result = machine.run("test", "tests/test_a.py", "-k", "test_1", "-m", "not tests")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped"), "no folder"
    result = machine.run("test", "tests")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "4 passed, 0 failed, 1 skipped"), "a folder"
    result = machine.run("test", "-k", "nothing")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "0 passed, 0 failed, 0 skipped"), "no test ran"

    machine.write("tests/test_a.py", "def test_1(): assert False\ndef test_2(x): pass\ndef test_3(): pass\n")
    machine.write(
        "tests/test_b.py",
        "import os\nos.environ.setdefault('TRITON_INTERPRET', '1')\ndef test_4(): os._exit(3)\n",
    )
    result = machine.run("test")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, "2 passed, 3 failed, 0 skipped"), (
        "a crash is a failure"
    )


def test_fast_runs_what_is_marked_fast(machine):
    machine.write("pytest.ini", "[pytest]\nmarkers =\n    fast\n    slow\n")
    mark = "import pytest\npytestmark = pytest.mark.fast\n"
    machine.write("tests/test_a.py", mark + "def test_1(): pass\n@pytest.mark.slow\ndef test_2(): assert False\n")
    machine.write("tests/test_b.py", "raise SystemExit('a file without a fast test is imported')")
    machine.write(
        "tests/test_c.py",
        "import os, pytest\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "@pytest.mark.fast\ndef test_3(): pass\ndef test_4(): assert False\n",
    )
    for arguments, passed in ((["--fast"], 2), (["tests/test_c.py", "--fast"], 1)):
        result = machine.run("test", *arguments)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (
            0,
            f"{passed} passed, 0 failed, 0 skipped",
        ), result.stdout + result.stderr
    result = machine.run("test", "--fast", "tests/test_b.py")
    assert result.returncode == 2
    assert "test --fast: expected a test marked fast" in result.stderr


def patterns(name: str) -> set[str]:
    """The patterns of a file like .gitignore. Docker's mean a path where git's mean any folder's, hence their **/."""
    lines = (ROOT / name).read_text().splitlines()
    return {line.removeprefix("**/").rstrip("/") for line in lines if line and not line.startswith("#")}


def test_an_image_holds_what_git_holds():
    assert patterns(".gitignore") <= patterns(".dockerignore")
    image = (ROOT / "Dockerfile").read_text()
    assert "\nCOPY . .\n" in image
    assert image.rstrip().endswith('ENTRYPOINT ["tini", "-g", "--", "./run.sh"]')
