#!/usr/bin/env bash
# ./run.sh [train_gpt.py options]   set up if needed, then train with what this machine has
# ./run.sh sample MODEL "text"      set up if needed, then use a saved model; options of sample.py
# ./run.sh test [pytest options]    set up if needed, then test, two processes at a time; --fast: the subset for an edit loop (tests/README.md)
# ./run.sh --help                   this, then the options of train_gpt.py; installs nothing
# Relative paths among the options mean the folder where they were typed; logs go to logs/ beside run.sh, or where --log-dir says.
# PYTHON=... is the interpreter to try first; RUN_SH_DRY=1 prints the training command instead of running it.
# NNODES=2 NODE_RANK=0 MASTER_ADDR=... ./run.sh   the same on each of several nodes, but for NODE_RANK; MASTER_PORT is 29500
set -euo pipefail
typed=$PWD
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
SPEEDRUN_TOKENS=500000000 SPRINT_TOKENS=94000000 # that the preset opens, as in train_gpt.py; a FineWeb shard holds 100 M
SPEEDRUN_GIB=65 SPRINT_GIB=61 SPRINT_SMALL_GIB=11 # of a card whose memory is nearly free (docs/memory.md)

say() { printf 'run.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
launch() { # COMMAND...: runs it, or prints it so that a shell reads the same words
  if [[ ! ${RUN_SH_DRY:-} ]]; then exec "$@"; fi
  local line; printf -v line ' %q' "$@"; printf '%s\n' "${line:1}"
}
absolute() { if [[ $1 == /* || $typed == "$PWD" ]]; then printf '%s' "$1"; else printf '%s' "$typed/$1"; fi; } # PATH, from where it was typed
option() { printf '%s\n' "${@:2}" | sed -n -e "/^$1\$/{n;p;}" -e "s/^$1=//p" | tail -n 1; } # NAME ARGUMENTS...: its value
cpu_settings() {
  # Measured on 2 cores, ms a smoke step. glibc gives the 100 MB of a step's logits back and faults them in again: 730, kept 330.
  # OpenMP's threads spin while they wait, which costs much beside another busy process: 2000-4500, asleep 630.
  export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=8589934592 OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
}

probe() { # PYTHON MODULES...: fails without them and a fitting torch, else prints its version, GPUs, 10 * capability, GiB of a GPU, training tokens
  "$1" - "$data" "${@:2}" <<'PYTHON'
import ctypes, importlib.util, runpy, sys
from pathlib import Path
if sys.version_info < (3, 11):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}")
if absent := [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]:
    sys.exit(f"{sys.executable} has no {', '.join(absent)}")
import numpy

def driver_says(build):  # [(major, minor, GiB) of each GPU]. torch would say the same, but takes 3 to 8 s to import beside a GPU
    cuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    def ask(function, *arguments, into=found):
        if getattr(cuda, function)(ctypes.byref(into), *arguments):
            raise OSError(function)
        return into.value
    if cuda.cuInit(0) or ask("cuDriverGetVersion") // 1000 < int(build.split(".")[0]):
        raise OSError("no GPU, or an old driver, of which torch may know more")
    gpus = [ask("cuDeviceGet", gpu) for gpu in range(ask("cuDeviceGetCount"))]
    return [(ask("cuDeviceGetAttribute", 75, gpu), ask("cuDeviceGetAttribute", 76, gpu), ask("cuDeviceTotalMem_v2", gpu, into=ctypes.c_size_t()) >> 30)
            for gpu in gpus]

try:
    build = runpy.run_path(Path(importlib.util.find_spec("torch").origin).with_name("version.py"))
    version, gpus = build["__version__"], driver_says(build["cuda"])
except (OSError, AttributeError):  # no CUDA in this build, no driver, or one that does not do
    import torch
    version, gpus = torch.__version__, []
    for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpus.append((*torch.cuda.get_device_capability(gpu), torch.cuda.get_device_properties(gpu).total_memory >> 30))
if tuple(map(int, version.split(".")[:2])) < (2, 11):  # train_gpt.py warns of versions that nobody has tried
    sys.exit(f"{sys.executable} has torch {version}")
major, minor, _ = min(gpus, default=(0, 0, 0))
gib = min((gpu[2] for gpu in gpus), default=0)
folder = Path(sys.argv[1])
try:
    tokens = sum(shard.stat().st_size // 2 for shard in folder.glob("*_train_*.bin")) if any(folder.glob("*_val_*.bin")) else 0
except OSError:  # the trainer says what is wrong with the folder
    tokens = 0
print(version, len(gpus), 10 * major + minor, gib, tokens)
PYTHON
}

find_python() { # MODULES...: sets python and facts to the first interpreter that has them
  for python in "${PYTHON:-python3}" python3 python .venv/bin/python; do
    if facts=$(probe "$python" "$@" 2>/dev/null); then return; fi
  done
  return 1
}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; } # PYTHON: of a version that torch is there for

setup() { # REQUIREMENTS MODULES...: sets python and facts. An environment that has the packages is used as it is, and never changed.
  local requirements=$1 base=${PYTHON:-python3} other lock=0; shift
  if find_python "$@"; then return; fi
  for other in "$base" ${PYTHON:-python3.13 python3.12 python3.14 python3.11}; do
    if fits "$other"; then base=$other; break; fi
    [[ $other != "${PYTHON:-python3.11}" ]] ||
      die "$base: expected Python 3.11 to 3.14, found $("$base" --version 2>&1 | tail -n 1); fix: PYTHON=/path/to/another/python ./run.sh"
  done
  # Two in a fresh clone would install into one .venv at once. The lock is this folder's, and ends with the process. Where there is no flock,
  # or a file system without locks, there is none.
  exec 9<.
  flock --nonblock --conflict-exit-code 9 9 2>/dev/null || lock=$?
  if ((lock == 9)); then
    say "another run.sh installs here: waiting for it"
    flock 9
    if find_python "$@"; then exec 9<&-; return; fi
  fi
  if "$python" -c '' 2>/dev/null && ! fits "$python"; then
    die ".venv: expected Python 3.11 to 3.14, found $("$python" --version 2>&1); fix: rm -rf .venv and start again"
  fi
  say "no python here has $* with torch >= 2.11: installing $requirements into .venv (once)"
  # An interrupted venv may lack pip. What else is in it may be the user's, so it is completed and not made anew: its Python may be away for a
  # while only, and the folder be another's.
  if ! "$python" -c '' 2>/dev/null && [[ -L .venv || -e $python || -L $python ]]; then
    die ".venv: expected a Python that starts, found none in it; fix: make $python start again, or rm -rf .venv and start again"
  fi
  { "$python" -c '' 2>/dev/null || "$base" -m venv .venv; } && { "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip; } ||
    die "python -m venv: expected a new .venv, found the error above; fix: let this folder be written to, or install your system's python3-venv package"
  "$python" -m pip install --disable-pip-version-check -r "$requirements" ||
    die "pip: expected to install $requirements, found the error above; fix: start again (PIP_INDEX_URL names another package index)"
  exec 9<&-
  facts=$(probe "$python" "$@") || die ".venv: expected the packages of $requirements, found the error above; fix: rm -rf .venv and start again"
}

choose_preset() { # GPUS CAPABILITY GIB TOKENS: sets preset and why
  local found="$(($4 / 1000000)) M training tokens in $data" fix="$python data/fineweb.py fetch" card="GPU memory of $3 GiB"
  if (($1 == 0)); then
    preset=smoke why="torch sees no GPU"
    if nvidia-smi -L >/dev/null 2>&1; then why+=", nvidia-smi does: a CPU build of torch, or a driver too old for it"; fi
  elif (($2 < 80)); then preset=smoke why="compute capability below 8.0: no bfloat16 or Triton there, --preset sprint would take hours"
  elif (($3 < SPRINT_SMALL_GIB)); then preset=smoke why="$card, sprint-small needs a card of 12 GB"
  elif (($4 < SPRINT_TOKENS)); then preset=smoke-gpu why="$found, sprint needs $((SPRINT_TOKENS / 1000000)) M: $fix --shards 1"
  elif (($3 < SPRINT_GIB)); then preset=sprint-small why="$found; $card, sprint needs a card of 80 GB"
  elif (($2 < 90)); then preset=sprint why="$found; speedrun is for compute capability 9 and above"
  elif (($3 < SPEEDRUN_GIB)); then preset=sprint why="$found; $card, speedrun needs cards of 80 GB"
  elif (($4 < SPEEDRUN_TOKENS)); then preset=sprint why="$found, speedrun needs $((SPEEDRUN_TOKENS / 1000000)) M: $fix"
  else preset=speedrun why="$found"; fi
}

meet() { # SECONDS: waits for all nodes. torchrun would wait ten minutes for one that never comes, and end with tracebacks
  TORCH_CPP_LOG_LEVEL=FATAL "$python" - "$1" <<'PYTHON'
import os, sys
from datetime import timedelta
from torch.distributed import DistError, TCPStore
nodes, node, address, port = int(os.environ["NNODES"]), int(os.environ["NODE_RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
limit = timedelta(seconds=float(sys.argv[1]))
def end(found, fix):
    sys.exit(f"run.sh: nodes: expected {nodes} within {sys.argv[1]} s, found {found}; fix: {fix}")
def wait(kind, others):
    try:
        store.wait([f"{kind} {other}" for other in others], limit)
    except DistError:
        absent = [str(other) for other in others if not store.check([f"{kind} {other}"])]
        end(f"no node {', '.join(absent)}", f"start ./run.sh there with MASTER_ADDR={address} and its own NODE_RANK")
try:
    store = TCPStore(address, port, is_master=node == 0, timeout=limit / 2, wait_for_workers=False)  # it tries twice
except (DistError, RuntimeError, ValueError) as error:
    if node == 0:
        end(f"{address}:{port} taken or not of this node", "NODE_RANK=0 on one node only, whose address is MASTER_ADDR; or another MASTER_PORT on all")
    end(f"no answer from {address}:{port}", "start ./run.sh there with NODE_RANK=0; see that the port is open")
if store.add(f"taken {node}", 1) > 1:
    end(f"node {node} twice", "NODE_RANK is 0 on the first node, 1 on the second, and so on")
store.set(f"here {node}", "")
wait("here", range(nodes))
store.set(f"gone {node}", "")
if node == 0:  # the others read from this process until then
    wait("gone", range(nodes))
PYTHON
}

advise() { # PRESET EXIT_CODE ARGUMENTS...: the end of --check, what this machine can do, how long that takes, what to type next
  local preset=$1 code=$2 takes next argument; shift 2
  case $preset in
    smoke) takes="one to two minutes on two free CPU cores" ;;
    smoke-gpu) takes="20 steps, a few minutes, most of them compilation" ;;
    sprint) takes="on one H200 34 s after a start of 60 to 80 s, the first time; on one card with a tenth of its speed ten times as long" ;;
    sprint-small) takes="a quarter of an hour (RTX 4080) to an hour (RTX 3060), computed: none was tried" ;;
    speedrun) takes="computed, not yet run: four minutes on one H200, under one on eight, besides a start of a minute" ;;
    *) takes="the first lines of a run say how many seconds are left" ;;
  esac
  if ((capability < 80)) && [[ $preset != smoke ]]; then takes="many hours here: no GPU, or one below compute capability 8.0"; fi
  if [[ $(option --length "$@") ]]; then takes="at full length: $takes"; fi
  for argument in "$@"; do [[ $argument == --check ]] || next+=" $(printf %q "$argument")"; done
  if ((code)); then say "preset $preset cannot run yet (exit code $code): mend what is said above, then check again. It takes $takes"; return; fi
  say "this machine can run preset $preset ($takes)"
  say "next: ./run.sh${next:-}"
  if [[ $preset != speedrun && ! $(option --preset "$@") && ! $(option --data "$@") ]] && ((capability >= 90 && gib >= SPEEDRUN_GIB)); then
    say "without --check it asks the Hugging Face hub, and if that answers fetches 2 GB of FineWeb and trains the speedrun instead"
  elif [[ $preset == smoke-gpu ]]; then
    say "then: $python data/fineweb.py fetch --shards 1 (400 MB), after which ./run.sh trains a sprint"
  fi
}

train() {
  local preset folder why='as asked' version gpus capability gib tokens world code=0 asked=("$@")
  preset=$(option --preset "$@") folder=$(option --data "$@") data=${folder:-data/fineweb10B}
  setup requirements.txt numpy torch
  read -r version gpus capability gib tokens <<<"$facts"
  ((gpus)) || cpu_settings
  if [[ ! $preset ]]; then
    if [[ ! $folder && " $* " != *" --check "* ]] && ((gpus && capability >= 90 && gib >= SPEEDRUN_GIB && tokens < SPEEDRUN_TOKENS)) &&
      timeout 10 "$python" -c \
      'from huggingface_hub import HfApi; HfApi().dataset_info("kjj0/fineweb10B-gpt2", timeout=5)' 2>/dev/null; then
      say "the hub answers: fetching FineWeb into $data, 2 GB, once"
      if "$python" data/fineweb.py fetch; then tokens=$SPEEDRUN_TOKENS; elif (($? == 130)); then exit 130
      else facts=$(probe "$python" numpy torch) && read -r version gpus capability gib tokens <<<"$facts"; fi # some shards may be there
    fi
    choose_preset "$gpus" "$capability" "$gib" "$tokens"
    set -- --preset "$preset" "$@"
  fi
  local nodes=${NNODES:-1} limit command=("$python") torchrun=(-m torch.distributed.run)
  case $nodes in 1 | 2 | 4 | 8) ;; *) die "NNODES: expected 1, 2, 4 or 8, found $nodes; fix: as many nodes" ;; esac
  for world in 8 4 2 1; do if ((gpus >= world && world * nodes <= 8)); then break; fi; done
  [[ $preset != smoke ]] || world=1
  case $preset in # without shards no start succeeds: one process says so once, and ends with the right exit code
    speedrun | sprint | sprint-small) ((tokens || nodes > 1)) || world=1 ;;
  esac
  if ((nodes == 1)); then
    say "preset $preset, $world process(es): $why. $gpus GPU(s) here, torch $version, $python"
    torchrun+=(--standalone)
  else
    say "preset $preset, $world process(es) on each of $nodes nodes: $why. $gpus GPU(s) here, torch $version, $python"
    [[ ${NODE_RANK:-} =~ ^[0-7]$ ]] && ((NODE_RANK < nodes)) ||
      die "NODE_RANK: expected 0 to $((nodes - 1)), found ${NODE_RANK:-none}; fix: NODE_RANK=0 on the first node, 1 on the second, and so on"
    [[ ${MASTER_ADDR:-} ]] || die "MASTER_ADDR: expected the address of node 0, found none; fix: MASTER_ADDR=..."
    export NNODES NODE_RANK MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
    limit=$(option --stall-limit "$@")
    [[ $MASTER_PORT =~ ^[0-9]{1,5}$ ]] && ((10#$MASTER_PORT > 0 && 10#$MASTER_PORT < 65536)) ||
      die "MASTER_PORT: expected 1 to 65535, found $MASTER_PORT; fix: a free port of node 0, the same on all"
    [[ ${limit:=120} =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)$ && $limit =~ [1-9] ]] || die "--stall-limit: expected seconds, found $limit; fix: --stall-limit 120"
    [[ ${RUN_SH_DRY:-} ]] || meet "$limit" || exit 2
    torchrun+=(--nnodes="$nodes" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT")
  fi
  if ((world * nodes > 1)); then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # what torchrun sets anyway, with a warning
    command+=("${torchrun[@]}" --nproc_per_node="$world")
  else
    unset RANK LOCAL_RANK WORLD_SIZE # a cluster's job has left them, and the trainer would wait for ranks that nobody starts
  fi
  if [[ " $* " != *" --check "* ]]; then
    if ((capability >= 80)) && [[ ! ${RUN_SH_DRY:-} ]]; then # the trainer finds in torch's and Triton's caches what this compiles
      local ahead=(benchmarks/compile_ahead.py --preset "$preset" --capability "${capability%?}.${capability: -1}")
      # Regions take 4 GiB of the GPU meanwhile. For several GPUs, whose shares have other sizes, kernels alone (records/LOG.md).
      ((gib < SPRINT_GIB || world * nodes > 1)) || ahead+=(--regions)
      "$python" "${ahead[@]}" </dev/null &>/dev/null &
    fi
    launch "${command[@]}" train_gpt.py "$@"; return
  fi
  (launch "${command[@]}" train_gpt.py "$@") || code=$?
  advise "$preset" "$code" ${asked[@]+"${asked[@]}"}
  return "$code"
}

sample() {
  data=data/sample
  setup requirements.txt numpy torch tiktoken
  launch "$python" sample.py "$@"
}

test_group() { # "FILES" OPTIONS...: one pytest process; its output appears as a whole, its report goes to $results
  local IFS=$'\n' files=${1#$'\n'} name code=0; shift; name=$(mktemp "$results/XXXXXX")
  # shellcheck disable=SC2086  # several files, a line each
  "$python" -m pytest -q --junitxml="$name.xml" $files "$@" >"$name" 2>&1 </dev/null || code=$?
  ((code <= 2 || code == 5)) || echo '<x><testsuite tests="1" failures="1"/></x>' >"$name.xml" # crashed; 5: no test chosen
  printf -- '--- %s\n%s\n' "${files//$'\n'/ }" "$(cat "$name")"
}

valued() { case $1 in -[kmpncoW] | --ignore | --deselect | --maxfail | --durations | --tb) ;; *) return 1 ;; esac; } # OPTION: whether pytest takes the next argument for its value

run_tests() { # Triton's interpreter is on or off for a whole process, so each file that turns it on has its own
  local argument previous='' file number=0 chosen=() options=() fast='' together=() alone=()
  for argument in "$@"; do
    if valued "$previous"; then options+=("$argument") previous=''; continue; fi
    previous=$argument
    case $argument in
      --fast) fast=yes options+=(-m "fast and not slow") ;;
      -*) options+=("$argument") ;;
      *.py | *.py::*) chosen+=("$argument") ;;
      *) if [[ -d $argument ]]; then chosen+=("$argument"/test_*.py); else options+=("$argument"); fi ;;
    esac
  done
  ((${#chosen[@]})) || chosen=(tests/test_*.py)
  if [[ $fast ]]; then # a file without a fast test is not even imported
    for file in "${!chosen[@]}"; do grep -q 'pytest\.mark\.fast' "${chosen[file]%%::*}" || unset "chosen[file]"; done
    ((${#chosen[@]})) || die "test --fast: expected a test marked fast, found none in those files; fix: leave --fast out"
  fi
  for file in "${chosen[@]}"; do
    if grep -q '^os.environ.*TRITON_INTERPRET' "${file%%::*}"; then alone+=("$file"); continue; fi
    together[number % 4]+=$'\n'$file # in turns, as neighbours by name are slow alike; in four, so that no core waits long at the end
    number=$((number + 1))
  done
  data=tests setup requirements-dev.txt numpy torch pytest hypothesis scipy
  cpu_settings
  results=$(mktemp -d); trap 'rm -rf "$results"' EXIT
  export python results OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUTF8=1; export -f test_group
  say "testing with $python: ${#alone[@]} file(s) in a process of their own, the others in ${#together[@]}; each prints when it is done"
  printf '%s\0' ${together[@]+"${together[@]}"} ${alone[@]+"${alone[@]}"} |
    xargs -0 -P 2 -I '{}' bash -c 'test_group "$@"' test_group '{}' ${options[@]+"${options[@]}"}
  "$python" - "$results"/*.xml <<'PYTHON'
import sys
from xml.etree import ElementTree
suites = [ElementTree.parse(report).find(".//testsuite") for report in sys.argv[1:]]
ran, failures, errors, skipped = (sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped"))
passed, failed = ran - failures - errors - skipped, failures + errors
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(failed > 0 or passed == 0)
PYTHON
}

help() { # ARGUMENTS...: run.sh's own options first, then those of the script that it would start, if a Python here can run it
  local data=data/fineweb10B facts script=train_gpt.py
  [[ ${1:-} != sample ]] || script=sample.py
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' run.sh
  if [[ ${1:-} == test ]]; then return; fi
  echo
  if find_python numpy torch; then "$python" "$script" --help
  else echo "Options of $script: docs/options.md, or again ./run.sh --help after the first ./run.sh, which installs what is needed."; fi
}

asks_help() { # ARGUMENTS...: whether one of them asks for help; words within a prompt do not
  local argument
  for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then return 0; fi
  done
  return 1
}

from_where_typed() { # ARGUMENTS...: sets arguments, the same with the paths among them absolute
  local argument previous='' model='' operand
  arguments=()
  for argument in "$@"; do
    case $previous in
      --data | --log-dir | --save | --checkpoint | --resume | --tensorboard | --export | --encoding) argument=$(absolute "$argument") ;;
    esac
    case $argument in
      --data=* | --log-dir=* | --save=* | --checkpoint=* | --resume=* | --tensorboard=* | --export=* | --encoding=*)
        argument=${argument%%=*}=$(absolute "${argument#*=}") ;;
    esac
    # Test files, or the model that a text is sampled from: its first operand, as a text may be a file's name too.
    operand=''
    case $1 in
      test) [[ $argument == test ]] || valued "$previous" || operand=yes ;;
      sample) [[ $model || $argument == sample || $argument == -* ]] || operand=yes
        case $previous in -- | --eval | --dense | --*=*) ;; --*) operand='' ;; esac ;; # it is that option's value
    esac
    if [[ $operand && ($1 == sample || -e $(absolute "${argument%%::*}")) ]]; then model=$(absolute "$argument") argument=$model; fi
    previous=$argument
    arguments+=("$argument")
  done
}

if asks_help "$@"; then help "$@"; exit; fi
if [[ ${PYTHON:-} == */* ]]; then PYTHON=$(absolute "$PYTHON"); fi
from_where_typed "$@"
set -- ${arguments[@]+"${arguments[@]}"}
case ${1:-} in
  test) run_tests "${@:2}" ;;
  sample) sample "${@:2}" ;;
  *) train "$@" ;;
esac
