import json
import os
import subprocess
import sys

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.sources import Question, characters, generate_questions, read_jsonl, read_questions
from megatron_rl.errors import BackendError, ConfigError, DataError

GOOD = b'{"prompt": "2+2=", "answer": "4"}'


def file_with_line_17(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 16 + [line] + [GOOD] * 3) + b"\n")
    return path


def test_jsonl_gives_prompt_answer_and_the_other_fields(tmp_path):
    path = tmp_path / "p.jsonl"
    # U+2028 is a line end to str.splitlines, not to JSON lines
    path.write_bytes(
        GOOD + b'\r\n\n  \n{"prompt": "a\\nb\xe2\x80\xa8c", "answer": "\xc3\xa9", "level": 3, "tags": ["x"]}'
    )
    first, second = read_questions(DataConfig(source="jsonl", path=str(path)))
    assert (first.text, first.answer, first.metadata) == ("2+2=", "4", {})
    assert (second.text, second.answer) == ("a\nb\u2028c", "é")
    assert second.metadata == {"level": 3, "tags": ["x"]}
    assert second.where == f"{path} line 4"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert [question.text for question in read_jsonl(path)] == ["2+2="]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x", "answer": ', "is not JSON"),
        (b'{"prompt": "\xff", "answer": "y"}', "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8 .maximum recursion depth"),
        (b'{"prompt": "x", "answer": "y", "n": ' + b"1" * 5000 + b"}", "is not JSON in UTF-8 .Exceeds the limit"),
        (rb'{"prompt": "\ud83d", "answer": "y"}', "'prompt' holds half of a surrogate pair.*Write the whole character"),
        (rb'{"prompt": "x", "answer": "\udc00"}', "'answer' holds half of a surrogate pair"),
        (b'["x", "y"]', "is a list, not an object"),
        (b'{"question": "x", "answer": "y"}', "has no 'prompt', only 'question', 'answer'"),
        (b'{"prompt": "x", "solution": "y"}', "has no 'answer', only 'prompt', 'solution'"),
        (b"{}", "has no 'prompt', only nothing"),
        (b'{"prompt": "x", "answer": 4}', "'answer' is 4 .int., .* Write it in quotes"),
        (b'{"prompt": null, "answer": "y"}', "'prompt' is null .NoneType."),
        (b'{"prompt": " ", "answer": "y"}', "'prompt' is empty"),
        (b'{"prompt": "x", "answer": ""}', "'answer' is empty"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path, line, message):
    with pytest.raises(DataError, match=rf"prompts\.jsonl line 17.*{message}"):
        read_jsonl(file_with_line_17(tmp_path, line))


def test_a_long_malformed_line_is_shown_shortened(tmp_path):
    with pytest.raises(DataError) as error:
        read_jsonl(file_with_line_17(tmp_path, b"x" * 100_000))
    assert len(str(error.value)) < 400


def test_a_missing_file_is_named_with_the_directory_it_was_sought_from(tmp_path):
    with pytest.raises(DataError, match=f"data.path=nowhere.jsonl cannot be read .No such file.*{os.getcwd()}"):
        read_questions(DataConfig(source="jsonl", path="nowhere.jsonl"))
    with pytest.raises(DataError, match="Is a directory"):
        read_jsonl(tmp_path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n")
    with pytest.raises(DataError, match="p.jsonl holds no prompts"):
        read_jsonl(path)


def test_characters_are_those_of_texts_answers_and_template():
    questions = [Question("ba", "c", "1"), Question("bé", "", "2")]
    assert characters(questions, "Q{prompt}") == "Qabcé"


def test_reasoning_gym_gives_the_librarys_own_entries():
    import reasoning_gym

    options = {"min_word_len": 4, "max_word_len": 6}
    questions = generate_questions("spell_backward", options, size=20, seed=5)
    dataset = reasoning_gym.create_dataset("spell_backward", size=20, seed=5, **options)
    for i, question in enumerate(questions):
        assert (question.text, question.answer) == (dataset[i]["question"], dataset[i]["answer"])
        assert question.metadata == {"task": "spell_backward", "task_options": options, "entry": dataset[i]}
        assert dataset.score_answer(question.answer, question.metadata["entry"]) == 1.0
        json.dumps(question.metadata)


def test_entries_are_the_same_whatever_the_hash_seed_of_the_process():
    # list_functions draws from the global generator, word_ladder and ransom_note walk over sets of strings.
    script = (
        "from megatron_rl.data.sources import generate_questions as g\n"
        "print([q for t in ('list_functions', 'ransom_note') for q in g(t, {}, size=3, seed=1)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].count("Question(") == 6


def test_a_task_without_a_single_right_answer_has_an_empty_one():
    (question,) = generate_questions("rush_hour", {}, size=1, seed=0)
    assert question.answer == ""


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match="data.task='spell_backwards' .* Did you mean 'spell_backward'"):
        generate_questions("spell_backwards", {}, size=1, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_word_length": 3}, "task_options.min_word_length is not an option of spell_backward.*'min_word_len'"),
        (
            {"min_word_len": 9, "max_word_len": 3},
            "cannot work for spell_backward: max_word_len must be >= min_word_len",
        ),
        ({"min_word_len": "many"}, "cannot work for spell_backward"),
        ({"size": 5}, "task_options.size is set by data.size"),
        ({"seed": 5}, "task_options.seed is set by data.seed"),
    ],
)
def test_impossible_task_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        generate_questions("spell_backward", options, size=1, seed=0)


def test_a_generator_that_dies_is_reported_with_its_last_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BackendError, match="reasoning_gym failed .* spell_backward"):
        generate_questions("spell_backward", {}, size=1, seed=0)
