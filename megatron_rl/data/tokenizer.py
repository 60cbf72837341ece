"""A checkpoint's tokenizer, and the text around a prompt."""

from pathlib import Path
from typing import Any

from megatron_rl.errors import ConfigError


def load_tokenizer(directory: Path | str) -> Any:
    """The transformers tokenizer of a checkpoint directory."""
    from transformers import AutoTokenizer  # seconds to import
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if not Path(directory).is_dir():
        raise ConfigError(f"{directory} is not a directory: no tokenizer can be read. Set model.path to a checkpoint.")
    try:
        has_file = (Path(directory) / "tokenizer.json").exists()
        code = None if has_file else get_tokenizer_config(str(directory), local_files_only=True).get("auto_map")
        if not code:
            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No tokenizer can be loaded from {directory}: {str(error).splitlines()[0]} "
            "Put tokenizer.json and tokenizer_config.json beside the weights."
        ) from error
    # transformers would make one of the vocabulary beside it for some model types, and split text otherwise.
    raise ConfigError(
        f"The tokenizer in {directory} is code ({code}), which is not run here. Put a tokenizer.json beside the "
        "weights, and take auto_map out of tokenizer_config.json."
    )


def render(text: str, template: str, tokenizer: Any) -> str:
    """`text` in the template. Raises: ConfigError for "chat" where the tokenizer has no chat template."""
    if template != "chat":
        return template.replace("{prompt}", text)
    if tokenizer.chat_template is None:
        raise ConfigError(
            "data.template=chat, but the tokenizer has no chat template. Use a chat model's checkpoint, or write the "
            'text around each prompt into data.template, for example "Q: {prompt} A:".'
        )
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    assert isinstance(rendered, str), type(rendered)
    return rendered
