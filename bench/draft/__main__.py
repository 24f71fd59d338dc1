"""Make a draft: python -m bench.draft write|train|export SETTINGS.toml OUT ..."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import config


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.draft", description=__doc__)
    made.add_argument("step", choices=("write", "train", "evaluate", "export"))
    made.add_argument("settings", type=Path, help="a TOML file, such as bench/draft/smollm2-135m.toml")
    made.add_argument("out", type=Path, help="folder of the run: text, checkpoints, the draft")
    made.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting, e.g. draft.block=16"
    )
    made.add_argument("--minutes", type=float, default=1e9, help="train: stop after so long; the same command goes on")
    made.add_argument("--weights", type=Path, help="train: begin with the weights of this checkpoint or GGUF")
    made.add_argument("--wait", action="store_true", help="train: compile, then wait for the text that write makes")
    return made


def main() -> int:
    args = parser().parse_args()
    until = time.time() + 60 * args.minutes
    settings = config.read(args.settings, args.set)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.step == "export":
        from .export import export

        print(export(settings, args.out))
        return 0
    import torch

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
    device = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if args.step == "write":
        from .write import write

        write(settings, args.out, device, rank)
        return 0
    from .anchors import Sequences
    from .train import Trainer

    if ranks > 1:
        torch.distributed.init_process_group("nccl" if device != "cpu" else "gloo")
    trainer = Trainer(settings, args.out, device, rank, ranks)
    text, checkpoint = args.out / f"text-{rank}.pt", args.out / "checkpoint.pt"
    if args.step == "train":
        began = time.time()
        trainer.warm()
        trainer.say(f"compiled in {time.time() - began:.0f} s")
        while args.wait and not text.exists():
            time.sleep(0.2)
    sequences = Sequences(text, device)
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif args.weights:
        trainer.load(args.weights, weights_only=True)
    if args.step == "train":
        trainer.run(sequences, until)
    if rank == 0:
        from .evaluate import evaluate

        evaluate(trainer, sequences)
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
