"""Compile every kernel of a training step for a GPU that need not be there,
and search its machine code for faults of the compiler.

    python benchmarks/machine_code.py                                        all stages of the sprint, for an H100
    python benchmarks/machine_code.py --preset speedrun --stages 0 2         some stages of another preset
    python benchmarks/machine_code.py --capability 10.0                      another GPU

For each kernel: registers, bytes of shared memory, instructions, those that spill registers, and faults: instructions
that take the stack pointer or a register that nothing has written for a number. The exit code is 1 if a kernel has a
fault. Run it before a new version of Triton is used: PTX and interpreter cannot show what ptxas makes of them.
Inductor's kernels are not among them.

The step runs as compile_ahead.py says.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton

from compile_ahead import capability_option, compile_only, packed, tg, train_and_validate

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


# ---- the search ------------------------------------------------------------------------------------------------------
# R1 is the stack pointer. It may be read for addresses ([R1+0x8]) and changed by itself, but is never a number.
STACK_POINTER = re.compile(
    r"\bST[SGL]\S* [^;,]*\], R1 ;|\b(?:LOP3|PRMT|SHF|F2FP|SEL|IMAD)\S* R(?!1,)\d+, (?:[^;]*, )?R1(?:\.reuse)?,[^;]*;"
)
# operation, operands
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*) *(.*?) *;", re.M)
PREDICATE = re.compile(r"!?U?P(\d|T)")
TWO_REGISTERS = re.compile(r"\.(?:64|WIDE|M88\.2)\b|^CS2R(?!\.32)")
FOUR_REGISTERS = re.compile(r"\.128|\.MT?88\.4|^HMMA")


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout


def registers_written(operation: str) -> int:
    """How many neighbouring registers an operation with a register as its first operand fills."""
    if products := re.match(r"[HQ]GMMA\.\d+x(\d+)x", operation):
        return int(products[1]) // 2
    return 4 if FOUR_REGISTERS.search(operation) else 2 if TWO_REGISTERS.search(operation) else 1


def unwritten(code: str) -> list[str]:
    """The PRMTs, which pick bytes of two registers, that pick some of a register which nothing before them has written.

    Bytes that stay in their places do not count: so a compiler fills a register byte by byte. Neither do other
    operations: flags are kept in registers that were never cleared, and some operations write pairs without saying
    so."""
    written = {1}
    found = []
    for operation, operands in INSTRUCTION.findall(code):
        places = [place for place in re.split(r", (?![^\[]*\])", operands) if not PREDICATE.fullmatch(place)]
        stores = (
            not places
            or not re.fullmatch(r"R\d+", places[0])
            or operation.startswith(("ST", "R2UR", "RED", "ATOM"))
        )
        sources = places if stores else places[1:]
        read = [{int(number) for number in re.findall(r"(?<!\w)R(\d+)", source)} for source in sources]

        if operation == "PRMT":
            counted = set().union(*read)
            # a digit for each byte of the result: 0 to 3 of the first register, 4 to 7 of the last
            if sources[1].startswith("0x"):
                picked = [int(sources[1], 16) >> 4 * byte & 7 for byte in range(4)]
                first = min(picked) < 4
                last = any(pick >= 4 and pick != byte + 4 for byte, pick in enumerate(picked))
                counted = (read[0] if first else set()) | (read[2] if last else set())
            if not counted <= written:
                found.append(f"{operation} {operands}")

        if not stores:
            start = int(places[0][1:])
            written |= set(range(start, start + registers_written(operation)))
        written = written.union(*read)  # each is told once
    return found


def faults(code: str) -> list[str]:
    """Instructions that take the stack pointer for a number, or a register without one."""
    return STACK_POINTER.findall(code) + unwritten(code)


# ---- the report -----------------------------------------------------------------------------------------------------
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=tg.PRESETS, default="sprint")
    parser.add_argument("--stages", type=int, nargs="+", help="from 0; by default all")
    parser.add_argument("--capability", type=capability_option, default="9.0")
    options = parser.parse_args()
    preset = tg.PRESETS[options.preset]
    last = len(preset.stages) - 1
    if not all(0 <= stage <= last for stage in options.stages or []):
        parser.error(f"--stages: expected 0 to {last}, found {options.stages}")
    kernels = {}  # by hash, as stages share most of them
    compile_only(options.capability, lambda name, kernel: kernels.setdefault(kernel.hash, (name, kernel)))
    train_and_validate(preset, packed(preset, options.stages or list(range(len(preset.stages)))))

    bad = 0
    print(f"Triton {triton.__version__}, compute capability {'.'.join(map(str, options.capability))}, {options.preset}")
    print(f"{'kernel':28} registers  shared  instructions  spills  faults")
    for name, kernel in sorted(kernels.values(), key=lambda found: found[0]):
        code = disassembled(kernel.asm["cubin"])
        registers = 1 + max(map(int, re.findall(r"\bR(\d+)", code)))
        found = faults(code)
        bad += bool(found)
        print(f"{name:28} {registers:9d} {kernel.metadata.shared:7d} {len(INSTRUCTION.findall(code)):13d}"
              f" {len(re.findall(r'STL|LDL', code)):7d}  {'; '.join(found[:3])}", flush=True)
    print(f"{len(kernels)} kernels, {bad} with faults")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
