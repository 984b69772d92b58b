"""The FP8 kernels as machine code, compiled without a GPU:
what ptxas makes of conversions whose results are stored in two layouts.

ptxas (of Triton 3.6 to 3.8) can drop the low half of a pair of FP8 numbers that is stored by single bytes while it
packs the pair into a wider store, and then reads the stack pointer, R1, or a register that nothing has written, in its
place. PTX and interpreter are right then; only the machine code and a GPU show it. So it is with clamps, which on a GPU
lose a NaN unless told otherwise, and in the interpreter keep it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from helpers import ROOT, tg

sys.path.insert(0, str(ROOT / "benchmarks"))
from machine_code import DISASSEMBLER, disassembled, faults

pytestmark = pytest.mark.skipif(not DISASSEMBLER.exists(), reason="this Triton brings no nvdisasm")
# compute capabilities: with FP8 MLPs and projections; with the FP8 head
HOPPER = (90, 100)
CONVERTING = (89, 90, 100, 120)
E4M3 = ("fp8e4nv", 448.0)
E5M2 = ("fp8e5", 57344.0)


def types_of(kernel, given):
    """Signature and alignment of a kernel's arguments: `given` types, and for the rest what the names say."""
    usual = {"rate": "fp32", "scale": "fp32", "factor": "fp32", "cap": "fp32", "shift": "fp32", "temperature": "fp32"}
    def type_of(name):
        return given.get(name) or (
            "*i32"
            if name.startswith(("class_index", "positions", "num_always"))
            else "*fp32"
            if name.endswith("_ptr")
            else next((kind for end, kind in usual.items() if name.endswith(end)), "i32")
        )
    return {name: type_of(name) for name in kernel.arg_names}


def machine_code(kernel, capability, warps, given, constants, stages=3):
    """The compiled kernel, disassembled."""
    types = {**types_of(kernel, given), **dict.fromkeys(constants, "constexpr")}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {
        places[name]: [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or kind == "i32"
    }
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = compile_source(
        source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps, num_stages=stages)
    )
    return disassembled(compiled.asm["cubin"])


def misuses(*arguments, **options):
    """Instructions of the compiled kernel that take R1 for a number, or a register without one."""
    return faults(machine_code(*arguments, **options))


def check_conversion(code, clamp=r"\bFMNMX\S*"):
    """Right registers, and a NaN stays one: the instructions that clamp would by default take the limit instead."""
    found = re.findall(clamp, code)
    assert not faults(code)
    assert found
    assert all(".NAN" in instruction for instruction in found)


def test_the_search_finds_what_it_is_for():
    bad = "STS.U8 [R107+UR4], R1 ;", "STG.E.U8 desc[UR4][R2.64], R1 ;", "LOP3.LUT R6, R1, 0xffff, RZ, 0xc0, !PT ;"
    assert faults("  @!P3 NOP ; ".join(bad)) == list(bad)
    assert not faults(
        "LDC R1, c[0x0][0x28] ;  STL [R1+0x8], R4 ;  STS.U8 [R1], R12 ;  LOP3.LUT R6, R12, R10, RZ, 0xc0, !PT ;"
    )
    bad = "  /*0070*/  PRMT R25, R24, 0x9910, RZ ;", "  /*0080*/  STG.E.128 desc[UR6][R2.64], R4 ;"
    good = (
        "  /*0010*/  LDG.E.128 R4, desc[UR6][UR8.64] ;",
        "  /*0020*/  CS2R R2, SRZ ;",
        "  /*0030*/  PRMT R8, R4.reuse, 0x7632, R8 ;",
    )
    assert faults("\n".join(bad))
    assert faults("\n".join((*good, *bad))) == ["PRMT R25, R24, 0x9910, RZ"]
    assert not faults("\n".join(good))


# A machine with 16 cores, on which the processes of the regions do nothing.
STARTER = """
import os
import runpy
import sys

os.sched_getaffinity = lambda process: range(16)
sys.executable = sys.argv[1]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
COMPILE_AHEAD = ROOT / "benchmarks/compile_ahead.py"


class Ahead:
    """A machine on which compile_ahead.py compiles a preset's kernels, with caches of its own."""

    def __init__(self, folder):
        self.kernels = folder / "kernels"
        self.cache = folder / "inductor"
        self.told = folder / "told"
        self.told.write_text("")
        self.python = folder / "python"
        self.python.write_text(f"#!/bin/sh\necho \"$@\" >> {shlex.quote(str(self.told))}\nexit $CODE\n")
        self.python.chmod(0o755)

    def run(self, code, *options):
        """How many kernels it compiled (None: it did not look), how many files say that all is there, and the commands
        that it started, which end with `code`."""
        before = len(self.told.read_text().splitlines())
        environment = os.environ | {
            "TRITON_CACHE_DIR": str(self.kernels), "TORCHINDUCTOR_CACHE_DIR": str(self.cache), "CODE": str(code)}
        command = [sys.executable, "-c", STARTER, self.python, COMPILE_AHEAD, "--preset", "sprint", *options]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert bool(result.returncode) == bool(code), result.stderr
        compiled = re.match(r"(\d+) kernels compiled in ", result.stdout)
        files = len(list(self.cache.glob("ahead_*")))
        return compiled and int(compiled[1]), files, sorted(self.told.read_text().splitlines()[before:])


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    return Ahead(tmp_path_factory.mktemp("ahead"))


@pytest.fixture(scope="module")
def first(ahead):
    """Its first run, in which it compiles all kernels, and the regions' processes fail."""
    return ahead.run(1, "--regions")


@pytest.mark.slow
def test_no_kernel_of_a_step_has_the_fault(ahead, first):
    """All that the first stage of the sprint launches, and its validation, as an H100 would compile it: from the cache,
    where the first run has left them."""
    script = [sys.executable, ROOT / "benchmarks/machine_code.py", "--stages", "0"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(ahead.kernels)}
    run = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.splitlines()[-1].split()[0]) > 35, run.stdout + run.stderr


@pytest.mark.slow
def test_what_is_compiled_is_not_compiled_again(ahead, first):
    """All kernels of a preset are in Triton's cache, where another process takes them from. And a file in torch's cache
    says that all is there, until an argument or a script changes. A failure leaves none."""
    compiled, files, lines = first
    assert compiled > 35
    assert files == 0
    assert len(lines) == 7
    assert all(line.startswith(f"{COMPILE_AHEAD} --preset sprint --only ") for line in lines)
    assert ahead.run(0, "--regions") == (0, 1, lines)
    assert ahead.run(0, "--regions") == (None, 1, [])
    assert ahead.run(0) == (0, 2, [])


@pytest.mark.parametrize("capability", CONVERTING)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_copies_in_both_layouts(kind, capability):
    given = dict(x_ptr="*bf16", out_ptr="*i8", out_t_ptr="*i32")
    constants = dict(FORMAT=kind, PTX=True, BLOCK_M=32, BLOCK_N=64)
    plain = dict(inverse_rms_ptr=None, positions_ptr=None, taps_ptr=None, TAPS=0)
    assert not misuses(tg.quantize_kernel, capability, 8, given, constants | plain)
    given |= dict(inverse_rms_ptr="*fp32", positions_ptr="*i32", taps_ptr="*fp32")
    assert not misuses(tg.quantize_kernel, capability, 8, given, constants | dict(TAPS=2))


@pytest.mark.parametrize("capability", CONVERTING)
def test_gradient_of_the_logits(capability):
    given = dict(logits_ptr="*bf16", out_ptr="*i8", out_t_desc="tensordesc<i8[64, 32]>")
    assert not misuses(
        tg.head_grad_kernel,
        capability,
        4,
        given,
        dict(TARGETS=3, FAST=True, PTX=True, BLOCK_M=32, BLOCK_N=64),
    )


def split_gradient(capability, ptx, value=True, keys=128, add=False):
    given = {f"{name}_ptr": "*bf16" for name in ("qkv", "value", "gates", "dq", "dk", "dv", "dvalue", "dgates")}
    given |= dict(dqkv_ptr="*i8", dqk_t_desc=f"tensordesc<i8[{keys // 2}, 64]>", dv_t_desc="tensordesc<i8[64, 64]>")
    nothing = {} if value else dict.fromkeys(("value_ptr", "gates_ptr", "dvalue_ptr", "dgates_ptr"))
    constants = dict(
        ADD=add,
        PTX=ptx,
        HEADS=6,
        HEAD_DIM_QK=keys,
        HEAD_DIM_V=128,
        VALUE_WIDTH=768,
        KEY_OFFSET=False,
        BLOCK_M=64,
        **nothing,
    )
    return misuses(tg.split_heads_grad_kernel, capability, 8, given, constants)


@pytest.mark.parametrize("capability", HOPPER)
@pytest.mark.parametrize("value", [False, True], ids=("no value", "value"))
@pytest.mark.parametrize("keys", [64, 128])
def test_gradient_of_the_projection(keys, value, capability):
    assert not split_gradient(capability, ptx=True, value=value, keys=keys)
    assert not value or not split_gradient(capability, ptx=True, keys=keys, add=True)


def test_the_cure_is_still_needed():
    if not split_gradient(90, ptx=False):
        pytest.skip("this ptxas is right: to_fp8_bits can give way to Triton's conversion")


@pytest.mark.parametrize("capability", HOPPER)
@pytest.mark.parametrize("backward", [False, True], ids=("forward", "backward"))
def test_products_of_the_mlp(backward, capability):
    kind, limit = E5M2 if backward else E4M3
    block, _ = tg.mlp_tile(backward)
    rows, columns, depth = block["BLOCK_M"], block["BLOCK_N"], block["BLOCK_K"]
    part = columns // block["PARTS"]
    tile = "tensordesc<{}[{}, {}]>".format
    given = dict(a_desc=tile(kind, rows, depth), b_desc=tile(E4M3[0], columns, depth),
                 hidden_desc=tile(E4M3[0], rows, part), out_desc=tile(kind, rows, part),
                 out_t_desc=tile("i8", part, rows))
    options = dict(warps=block.pop("num_warps"), stages=block.pop("num_stages"))
    constants = dict(WIDTH=768, LIMIT=limit, **block) | ({} if backward else {"hidden_desc": None})
    check_conversion(
        machine_code(tg.mlp_kernel, capability, given=given, constants=constants, **options),
        clamp=r"\bFMNMX\S*XORSIGN\S*",
    )  # others: relu


@pytest.mark.parametrize("capability", HOPPER)
def test_all_warps_know_which_rows_are_present_before_one_says_so(capability):
    """When a lookup's gradient is added to that of an earlier one, every warp asks whether the row has one yet, and one
    of them writes that it has. No interpreter shows what a warp that is late would read."""
    given = dict(grad_ptr="*bf16", order_ptr="*i32", starts_ptr="*i32", partial_ptr="*fp32", vocab_rows="i32",
                 dense_ptr="*bf16", present_ptr="*i8", width="i32")
    constants = dict(IDS_PER_ROW=1, SPAN=tg.SPAN, BLOCK_M=4, BLOCK_N=1024, ADD=True)
    code = machine_code(tg.embedding_grad_kernel, capability, 2, given, constants)
    assert re.findall(r"LDG\.E\.[US]8|BAR\.SYNC|STG\.E\.[US]8", code) == ["LDG.E.U8", "BAR.SYNC", "STG.E.U8"]
