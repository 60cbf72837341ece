import json
import random

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import Limits, Prompts, load_prompts, split
from megatron_rl.data.sources import Question
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.types import Prompt

PAD, EOS, UNKNOWN = 0, 1, 2
CHARACTERS = " 0123456789+=AQabn:"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write_tokenizer(directory, **settings):
    """One token a character; ids follow CHARACTERS after <pad>, <eos>, <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {t: i for i, t in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", **settings}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(str(directory))
    return directory


def ids_of(text):
    return tuple(3 + CHARACTERS.index(c) for c in text)


def write_jsonl(path, pairs):
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs))
    return DataConfig(source="jsonl", path=str(path), held_out=0, seed=3)


SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(7) for b in range(7)]


@pytest.fixture
def sums(tmp_path):
    return write_jsonl(tmp_path / "sums.jsonl", SUMS)


def with_(config, **changes):
    return DataConfig(**{**vars(config), **changes})


def test_a_prompt_holds_its_text_tokens_and_answer(tmp_path, tokenizer_dir):
    config = write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3")])
    (prompt,) = load_prompts(with_(config, template="Q: {prompt} A:"), tokenizer_dir).take(1)
    assert prompt.text == "Q: 1+2= A:"
    assert prompt.tokens == ids_of("Q: 1+2= A:")
    assert prompt.answer == "3"


def test_braces_of_a_prompt_are_text(tmp_path, tokenizer_dir):
    config = write_jsonl(tmp_path / "p.jsonl", [("{prompt}{0}", "3")])
    (prompt,) = load_prompts(config, tokenizer_dir).take(1)
    assert prompt.text == "{prompt}{0}"


def test_chat_template_wraps_the_prompt(tmp_path):
    chat = "{% for m in messages %}Q:{{ m.content }}{% endfor %}{% if add_generation_prompt %} A:{% endif %}"
    directory = write_tokenizer(tmp_path / "tok", chat_template=chat)
    config = with_(write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3")]), template="chat")
    (prompt,) = load_prompts(config, directory).take(1)
    assert (prompt.text, prompt.tokens) == ("Q:1+2= A:", ids_of("Q:1+2= A:"))


def test_a_tokenizer_without_chat_template_is_refused_with_template_chat(sums, tokenizer_dir):
    with pytest.raises(ConfigError, match="template=chat, but the tokenizer has no chat template"):
        load_prompts(with_(sums, template="chat"), tokenizer_dir)


def test_answer_tokens_are_the_answer_and_the_end(sums, tokenizer_dir):
    prompts = load_prompts(sums, tokenizer_dir)
    assert prompts.answer_tokens(Prompt("i", "1+9=", (1,), "10")) == (*ids_of("10"), EOS)


def test_answer_tokens_refuse_a_prompt_without_an_answer_and_a_tokenizer_without_an_end(sums, tokenizer_dir, tmp_path):
    with pytest.raises(DataError, match="Prompt i has no reference answer"):
        load_prompts(sums, tokenizer_dir).answer_tokens(Prompt("i", "?", (1,), ""))
    endless = write_tokenizer(tmp_path / "tok", eos_token=None)
    with pytest.raises(ConfigError, match="no eos_token"):
        load_prompts(sums, endless).answer_tokens(Prompt("i", "?", (1,), "1"))


def test_every_epoch_takes_every_prompt_once_in_another_order(sums, tokenizer_dir):
    prompts = load_prompts(sums, tokenizer_dir)
    n = len(SUMS)
    epochs = [[p.text for p in prompts.take(n)] for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(text for text, _ in SUMS)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_step_may_span_an_epochs_end(sums, tokenizer_dir):
    whole, parts = (load_prompts(sums, tokenizer_dir) for _ in range(2))
    expected = whole.take(5 * len(SUMS))
    assert [p for n in (40, 1, 49, 100, 55) for p in parts.take(n)] == expected


def test_held_out_prompts_never_train_over_many_epochs(sums, tokenizer_dir):
    prompts = load_prompts(with_(sums, held_out=13), tokenizer_dir)
    held_out = {p.text for p in prompts.held_out}
    assert len(held_out) == 13
    trained = {p.text for p in prompts.take(20 * len(SUMS))}
    assert trained.isdisjoint(held_out)
    assert trained | held_out == {text for text, _ in SUMS}


def test_split_and_order_depend_on_the_seed(sums, tokenizer_dir):
    one, two = (load_prompts(with_(sums, held_out=13, seed=s), tokenizer_dir) for s in (0, 1))
    assert {p.id for p in one.held_out} != {p.id for p in two.held_out}
    assert [p.id for p in one.take(9)] != [p.id for p in two.take(9)]


def test_split_and_order_do_not_depend_on_the_order_of_the_file(tmp_path, sums, tokenizer_dir):
    shuffled = SUMS.copy()
    random.Random(0).shuffle(shuffled)
    other = write_jsonl(tmp_path / "shuffled.jsonl", shuffled)
    one, two = (load_prompts(with_(c, held_out=13), tokenizer_dir) for c in (sums, other))
    assert one.held_out == two.held_out
    assert one.take(60) == two.take(60)


def test_the_split_follows_content_when_the_template_changes(sums, tokenizer_dir):
    one, two = (load_prompts(with_(sums, held_out=13, template=t), tokenizer_dir) for t in ("{prompt}", "Q: {prompt}"))
    assert [p.id for p in one.held_out] == [p.id for p in two.held_out]


def test_most_held_out_prompts_stay_held_out_when_prompts_are_added():
    def questions(n):
        return [(f"id{i}", Question(str(i), "a", "w")) for i in range(n)]

    before = {i for i, _ in split(questions(1000), held_out=100, seed=0)[1]}
    after = {i for i, _ in split(questions(1050), held_out=100, seed=0)[1]}
    assert len(before & after) >= 90


def test_repeated_prompts_are_removed_before_the_split(tmp_path, tokenizer_dir, caplog):
    config = write_jsonl(tmp_path / "p.jsonl", [*SUMS, *SUMS[:20], ("0+0=", "7")])
    prompts = load_prompts(with_(config, held_out=13), tokenizer_dir)
    texts = [p.text for p in (*prompts.train, *prompts.held_out)]
    assert sorted(texts) == sorted(text for text, _ in SUMS)
    assert next(p.answer for p in (*prompts.train, *prompts.held_out) if p.text == "0+0=") == "0"
    assert "1 repeated prompts have another answer" in caplog.text and "line 70" in caplog.text


def test_holding_out_everything_is_refused(sums, tokenizer_dir):
    with pytest.raises(DataError, match="data.held_out=49 of 49 distinct prompts leaves none to train on"):
        load_prompts(with_(sums, held_out=49), tokenizer_dir)


def test_a_resumed_order_equals_the_uninterrupted_one(sums, tokenizer_dir):
    for taken in (0, 1, 17, 49, 50, 98, 120):
        whole, resumed = (load_prompts(with_(sums, held_out=5), tokenizer_dir) for _ in range(2))
        whole.take(taken)
        resumed.restore(json.loads(json.dumps(whole.state())))
        assert resumed.take(99) == whole.take(99)


def test_the_state_before_does_not_change_with_what_is_taken_after(sums, tokenizer_dir):
    prompts = load_prompts(sums, tokenizer_dir)
    prompts.take(7)
    state = prompts.state()
    expected = prompts.take(60)
    prompts.restore(state)
    assert prompts.take(60) == expected


def test_resuming_on_other_data_is_refused(tmp_path, sums, tokenizer_dir):
    state = load_prompts(with_(sums, held_out=5), tokenizer_dir).state()
    changed = [
        with_(sums, held_out=6),
        with_(sums, held_out=5, seed=4),
        with_(sums, held_out=5, template="Q: {prompt}"),
        with_(write_jsonl(tmp_path / "fewer.jsonl", SUMS[1:]), held_out=5),
        with_(write_jsonl(tmp_path / "answers.jsonl", [(p, "0") for p, _ in SUMS]), held_out=5),
    ]
    for config in changed:
        with pytest.raises(DataError, match="made with other prompts.*Put back"):
            load_prompts(config, tokenizer_dir).restore(state)


def test_a_prompt_longer_than_the_context_is_named_with_its_line(tmp_path, tokenizer_dir):
    config = write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3"), ("1+2=" * 5, "3"), ("2+2=", "4")])
    assert len(load_prompts(config, tokenizer_dir, limits=Limits(prompt_tokens=20)).train) == 3
    with pytest.raises(
        DataError, match=r"p\.jsonl line 2\) has 20 tokens, more than the 19 .*lower sampling.max_tokens"
    ):
        load_prompts(config, tokenizer_dir, limits=Limits(prompt_tokens=19))


def test_a_token_that_the_model_does_not_have_is_named_with_its_line(tmp_path, tokenizer_dir):
    config = write_jsonl(tmp_path / "p.jsonl", [("1=", "2"), ("0=n", "1:")])
    largest = ids_of(":")[0]  # then n, in a prompt
    assert (
        len(load_prompts(config, tokenizer_dir, limits=Limits(demonstration_tokens=99, vocab_size=largest + 1)).train)
        == 2
    )
    assert len(load_prompts(config, tokenizer_dir, limits=Limits(vocab_size=largest)).train) == 2  # no answer trains

    with pytest.raises(DataError, match=rf"The answer of prompt \w+ \(.*line 2\) has token {largest}, and the model's"):
        load_prompts(config, tokenizer_dir, limits=Limits(demonstration_tokens=99, vocab_size=largest))
    with pytest.raises(DataError, match=rf"Prompt \w+ \(.*line 2\) has token {largest - 1}, .*ends at {largest - 2} "):
        load_prompts(config, tokenizer_dir, limits=Limits(vocab_size=largest - 1))


def test_an_answer_that_does_not_fit_beside_its_prompt_is_named_with_its_line(tmp_path, tokenizer_dir):
    config = write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3"), ("3+2=", "10" * 8), ("2+2=", "4")])
    assert len(load_prompts(config, tokenizer_dir, limits=Limits(demonstration_tokens=4 + 16 + 1)).train) == 3
    with pytest.raises(
        DataError, match=r"p\.jsonl line 2\) has 4 tokens and its answer 16; with the end .* than the 20 .*Shorten"
    ):
        load_prompts(config, tokenizer_dir, limits=Limits(demonstration_tokens=20))


def test_the_answer_of_a_held_out_prompt_may_be_long(tmp_path, tokenizer_dir):
    config = with_(write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3"), ("3+2=", "10" * 8)]), held_out=1)
    seed = next(s for s in range(9) if load_prompts(with_(config, seed=s), tokenizer_dir).held_out[0].text == "3+2=")
    assert len(load_prompts(with_(config, seed=seed), tokenizer_dir, limits=Limits(demonstration_tokens=6)).train) == 1


def test_unknown_characters_are_warned_of(tmp_path, tokenizer_dir, caplog):
    config = write_jsonl(tmp_path / "p.jsonl", [("1+2=", "3"), ("1*2=", "2")])
    prompts = load_prompts(config, tokenizer_dir)
    assert "1 of 2 prompts hold text that the tokenizer does not know" in caplog.text
    assert UNKNOWN in next(p.tokens for p in prompts.train if "*" in p.text)


def test_a_directory_without_a_tokenizer_is_refused(sums, tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        load_prompts(sums, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="No tokenizer can be loaded from .*empty"):
        load_prompts(sums, tmp_path / "empty")


def test_a_tokenizer_that_is_code_is_refused(sums, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.TikTokenTokenizer", null]}}')
    with pytest.raises(ConfigError, match=r"is code \(.*x\.TikTokenTokenizer.*Put a tokenizer\.json beside"):
        load_prompts(sums, tmp_path)


def test_reasoning_gym_prompts_carry_what_their_verifier_needs(tokenizer_dir):
    from megatron_rl.rewards import load_reward

    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = DataConfig(source="reasoning_gym", task="chain_sum", task_options=options, size=40, held_out=8, seed=2)
    prompts = load_prompts(config, tokenizer_dir)
    verify = load_reward("verifier")
    for prompt in prompts.take(3):
        assert verify(prompt.answer, prompt) == 1.0
        assert verify(prompt.answer + "1", prompt) < 1.0
    assert isinstance(prompts, Prompts)
    assert len(prompts.held_out) == 8
