"""The command line: python tools/convert import|export|verify."""

import argparse
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.convert.exporting import export_checkpoint
from megatron_rl.convert.importing import import_checkpoint
from megatron_rl.convert.verifying import verify_checkpoint
from megatron_rl.errors import BackendError, ConfigError, DataError, LayoutError

DONE, DIFFERENT, REFUSED, INTERRUPTED = 0, 1, 2, 130
PER_CORE, PROCESSES = 2, 8
"""Workers wait for the disk half of the time; no disk is faster with more than so many. The user may say otherwise."""

DESCRIPTION = """Hugging Face checkpoints into megatron-core's distributed format (torch_dist) and back, bit for bit.

  import   reads safetensors (one file or many; bf16, fp16, fp32, FP8 in blocks of 128 x 128), writes a checkpoint that
           megatron-core loads on any tensor, pipeline and expert layout; model.path=DIR trains from it
  export   writes safetensors again: what was imported, or what a run has trained (runs/NAME/checkpoints/step_NNNNNN)
  verify   compares a checkpoint with the hashes of its import, and with --hf with the Hugging Face checkpoint

A conversion that was ended goes on with the same command. Exit codes: 0 done or equal, 1 different, 2 refused."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done or equal, 1 different, 2 refused or failed, 130 interrupted."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Set before anything is imported that reads them: workers copy, they do not compute.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")  # that Transformer Engine and Apex are not there
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # nor a CUDA runtime
    try:
        code, notes = COMMANDS[asked.command](asked)
    except (ConfigError, DataError, LayoutError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except BackendError as error:
        print(f"failed: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"failed: {error}. Mend that; the same command then goes on from here.", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    except Exception:  # Python ends with 1, which would say that checkpoints differ
        traceback.print_exc()
        return REFUSED
    print("\n".join(notes))
    return code


def _import(asked: argparse.Namespace) -> tuple[int, list[str]]:
    return DONE, import_checkpoint(asked.hf, asked.out, processes=asked.processes)


def _export(asked: argparse.Namespace) -> tuple[int, list[str]]:
    differing, notes = export_checkpoint(asked.checkpoint, asked.out, processes=asked.processes, quantize=asked.fp8)
    if differing:
        text = f"different: {len(differing)} tensors do not hash to what the manifest says; {asked.out} is not written"
        return DIFFERENT, [text, *differing]
    return DONE, notes


def _verify(asked: argparse.Namespace) -> tuple[int, list[str]]:
    differences, notes = verify_checkpoint(asked.checkpoint, asked.hf, processes=asked.processes)
    return (DIFFERENT if differences else DONE), [*differences, *notes]


COMMANDS = {"import": _import, "export": _export, "verify": _verify}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "convert", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export|verify")
    reads = commands.add_parser("import", help="Hugging Face -> torch_dist")
    writes = commands.add_parser("export", help="torch_dist -> Hugging Face")
    compares = commands.add_parser("verify", help="compare a checkpoint with its import's hashes, and with --hf")
    reads.add_argument("--hf", type=Path, required=True, help="directory of a Hugging Face checkpoint")
    reads.add_argument("--out", type=_absolute, required=True, help="directory to make")
    writes.add_argument("--checkpoint", type=_absolute, required=True, help="what import wrote, or a step of a run")
    writes.add_argument("--out", type=_absolute, required=True, help="directory to make")
    writes.add_argument("--fp8", action="store_true", help="FP8 e4m3 in blocks of 128 x 128, as DeepSeek's own files")
    compares.add_argument("--checkpoint", type=_absolute, required=True, help="what import wrote")
    compares.add_argument("--hf", type=Path, help="compare with this Hugging Face checkpoint too")
    for one in (reads, writes, compares):
        default = min(PER_CORE * len(os.sched_getaffinity(0)), PROCESSES)
        one.add_argument("--processes", type=_positive, default=default, help=f"at the same time (here {default})")
    return parser


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))  # "." has no name to write beside


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
