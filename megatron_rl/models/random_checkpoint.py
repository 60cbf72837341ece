"""Write a Hugging Face checkpoint with random weights and a character tokenizer: something to train from nothing."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.errors import ConfigError
from megatron_rl.layouts.boxes import DTYPE_BYTES
from megatron_rl.layouts.compile import hf_layouts
from megatron_rl.models import load_table
from megatron_rl.models.family import read

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
INITIALIZER_RANGE = 0.02  # what transformers takes when a config does not say


def write_random_checkpoint(
    directory: Path | str, hf_config: dict[str, Any], *, characters: str, seed: int, jitter: float = 0.0
) -> None:
    """Write config.json, generation_config.json, model.safetensors and a tokenizer that knows `characters`.

    Matrices are normal with std `initializer_range`, norms 1 and biases 0; `jitter` is the std of what is added to
    norms and biases, so that tests see one put in another's place. Weights are in the config's `dtype`, the
    router's correction bias always float32. vocab_size comes from the tokenizer when the config leaves it out.
    Raises: ConfigError when vocab_size is smaller than the tokenizer.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokens = [PAD, EOS, UNKNOWN, *sorted(set(characters))]
    vocab_size = hf_config.get("vocab_size", len(tokens))
    if vocab_size < len(tokens):
        raise ConfigError(
            f"vocab_size={vocab_size} is smaller than the tokenizer's {len(tokens)} tokens: some text would have no "
            f"embedding. Set it to at least {len(tokens)}, or leave it out."
        )
    config = {
        **hf_config,
        "vocab_size": vocab_size,
        "pad_token_id": tokens.index(PAD),
        "eos_token_id": tokens.index(EOS),
        "bos_token_id": None,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {k: config[k] for k in ("eos_token_id", "pad_token_id")})
    _write_tokenizer(directory, tokens, max_length=read(config, "max_position_embeddings"))
    _write_weights(directory / "model.safetensors", config, seed=seed, jitter=jitter)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(directory: Path, tokens: list[str], *, max_length: int) -> None:
    """One token a character; what it does not know becomes <unk>. Decoding gives back the text, spaces included."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    try:
        fast.save_pretrained(str(directory))
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # tokenizers knows no other word for a disk that refuses


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"config.json has dtype={dtype!r}: weights are {', '.join(DTYPE_BYTES)}. Set one of them.")
    return str(dtype)


def _write_weights(path: Path, config: dict[str, Any], *, seed: int, jitter: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    std = config.get("initializer_range", INITIALIZER_RANGE)
    tensors = {}
    table = load_table(config)
    for layout in hf_layouts(table, dtype=_dtype(config)):
        noise = torch.randn(layout.shape, generator=generator)
        if layout.name.endswith("bias"):
            value = noise * jitter
        elif len(layout.shape) == 1:
            value = 1 + noise * jitter
        else:
            value = noise * std
        tensors[layout.name] = value.to(getattr(torch, layout.dtype))
    tensors |= {name: tensors[own].clone() for name, own in table.aliases.items()}
    save_file(tensors, path, metadata={"format": "pt"})
