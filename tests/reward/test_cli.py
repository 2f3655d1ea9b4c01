"""`verl reward test`, as a command."""

from __future__ import annotations

import json

import pytest

from verl.cli import main


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"1+{n}?"}],
            "answer": f"so\n#### {n + 1}",
            "level": n,
            "data_source": "gsm8k",
        }
        for n in range(5)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def write(tmp_path, text: str) -> str:
    path = tmp_path / "fn.py"
    path.write_text(text)
    return str(path)


def test_it_shows_what_the_function_saw_and_gave(tmp_path, data, capsys):
    fn = write(
        tmp_path,
        "def mine(prompt, response, level):\n    print('seen', prompt)\n    return {'score': level, 'n': "
        "len(response)}\n",
    )
    assert main(["reward", "test", "--fn", fn, "--data", data, "--rows", "2"]) == 0
    out = capsys.readouterr().out
    for text in (
        "mine",
        "parameters: prompt, response, level",
        "1+0?",
        "#### 1",
        "it printed    seen 1+1?",
        "score         1",
        "4 scores",
    ):
        assert text in out, text


def test_the_scorer_of_the_data_source_is_the_default(data, capsys):
    assert main(["reward", "test", "--data", data, "--rows", "1", "--kwargs", '{"method": "flexible"}']) == 0
    assert "score         1 " in capsys.readouterr().out


def test_given_responses(tmp_path, data, capsys):
    assert main(["reward", "test", "--data", data, "--rows", "1", "--response", "#### 1"]) == 0
    assert "given response" in capsys.readouterr().out
    assert main(["reward", "test", "--data", data, "--rows", "1", "--response-key", "answer"]) == 0
    assert main(["reward", "test", "--data", data, "--rows", "1", "--response-key", "no"]) == 2
    assert "level" in capsys.readouterr().err


@pytest.mark.slow(seconds=3)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(response):\n    return None\n", "no score for any"),
        ("def f(response):\n    return 'x'\n", "no score for any"),
        ("def f(response):\n    1/0\n", "no score for any"),
        ("def f(response, levle):\n    return 1\n", "'levle', which nothing provides"),
        ("def f(:\n", "SyntaxError"),
        ("import os\ndef f(response):\n    os._exit(1)\n", "no score for any"),
    ],
)
def test_a_function_that_cannot_be_used_ends_with_exit_code_two(tmp_path, data, capsys, text, words):
    assert main(["reward", "test", "--fn", write(tmp_path, text), "--data", data, "--rows", "1"]) == 2
    assert words in capsys.readouterr().err


def test_missing_files_are_named(data, capsys):
    assert main(["reward", "test", "--fn", "nowhere/fn.py", "--data", data]) == 2
    assert "nowhere/fn.py" in capsys.readouterr().err
    assert main(["reward", "test", "--data", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    assert main(["reward", "test", "--data", data, "--kwargs", "{"]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_every_response_of_a_list_is_scored(tmp_path, capsys):
    data = tmp_path / "rows.jsonl"
    rows = [{"responses": ["#### 1", "#### 2"], "answer": "#### 1"}, {"answer": "#### 1"}]
    data.write_text("\n".join(json.dumps({"prompt": "q", "data_source": "gsm8k", **row}) for row in rows))
    command = ["reward", "test", "--data", str(data), "--in-process", "--response-key", "responses", "--rows"]
    assert main([*command, "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["score"]] == ["1", "0"]
    assert [" ".join(line[1:]) for line in lines if line[:1] == ["response"]] == ["#### 1", "#### 2"]
    assert main([*command, "2"]) == 2
    assert "row 1 of" in capsys.readouterr().err


def test_extra_info_of_a_csv_file(tmp_path, capsys):
    fn = write(tmp_path, "def f(response, extra_info):\n    return extra_info['k']\n")
    data = tmp_path / "rows.csv"
    command = ["reward", "test", "--fn", fn, "--data", str(data), "--in-process"]
    data.write_text('prompt,answer,extra_info\nq,1,"{""k"": 7}"\n')
    assert main(command) == 0
    assert "score         7 " in capsys.readouterr().out
    data.write_text('prompt,answer,extra_info\nq,1,"{""k"": 7}"\nq,1,"{""k"": "\n')
    assert main(command) == 2
    assert "extra_info of row 1 of" in capsys.readouterr().err
