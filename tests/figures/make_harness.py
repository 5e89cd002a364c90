"""Make harness.json: what lm-evaluation-harness's own Hugging Face backend says about the tasks in tests/tasks.

The demo model's weights, dequantised to float32 (see make_smollm2.py), behind the harness's `HFLM`. To re-run, in a
virtual environment of its own:

    pip install torch==2.13.0 transformers gguf tokenizers numpy 'lm-eval[hf]==0.4.13'
    python tests/figures/make_harness.py --model "$(python pyferrum/demo_model.py)" --text pyferrum/data/tidewatch.txt

It takes about a minute on two cores. In the file:

    choice      for each question: log-likelihood, greediness and tokens of each choice, and whether it was right
    pages       for each page: its log-likelihood (loglikelihood_rolling) and the NLL of each token
    answers     for each question: the text generated
    tidewatch   log-likelihood of the evaluation text in windows of 512 tokens, and the NLL of each token
    results     the harness's metrics
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows
from make_smollm2 import byte_level_bpe, field, load_model

HERE = Path(__file__).parent
WINDOW = 512


@torch.no_grad()
def token_nlls(lm: HFLM, text: str, window: int) -> list[float]:
    """NLL of each token of a text in the harness's rolling windows, from the model itself."""
    nlls: list[float] = []
    for fed, scored in get_rolling_token_windows(lm.tok_encode(text), lm.prefix_token_id, window, 1):
        logits = lm.model(input_ids=torch.tensor([fed])).logits[0, -len(scored) :].double()
        picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(scored)[:, None])[:, 0]
        nlls += (-picked).tolist()
    return nlls


def rounded(values: list[float]) -> list[float]:
    """Seven decimals: less than float32 has here, more than anything is compared to."""
    return [round(value, 7) for value in values]


def main() -> None:
    """Run the tasks and write the file."""
    parser = argparse.ArgumentParser(description="Make the harness's reference figures.")
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct Q4_1 GGUF")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 evaluation text")
    arguments = parser.parse_args()

    reader = gguf.GGUFReader(arguments.model)
    names = field(reader, "tokenizer.ggml.tokens")
    special = {role: names[field(reader, f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos")}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(reader), bos_token=special["bos"], eos_token=special["eos"]
    )
    model = load_model(reader)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=2048, softmax_dtype="float64")
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=["harbour_choice", "harbour_pages", "harbour_answers"],
        task_manager=TaskManager(include_path=str(HERE.parent / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    samples: dict[str, list[Any]] = found["samples"]
    text = arguments.text.read_text()
    lm_512 = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW, softmax_dtype="float64")
    request = lm_eval.api.instance.Instance("loglikelihood_rolling", {}, (text,), 0)
    value = {
        "gguf_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "lm_eval": "0.4.13"},
        "choice": [
            {
                "loglikelihoods": rounded([response[0][0] for response in sample["resps"]]),
                "greedy": [response[0][1] for response in sample["resps"]],
                "tokens": [len(lm._encode_pair(*pair)[1]) for pair in sample["arguments"]],
                "acc": sample["acc"],
                "acc_norm": sample["acc_norm"],
            }
            for sample in samples["harbour_choice"]
        ],
        "pages": [
            {
                "loglikelihood": rounded([sample["resps"][0][0]])[0],
                "nlls": rounded(token_nlls(lm, sample["doc"]["page"], lm.max_length)),
            }
            for sample in samples["harbour_pages"]
        ],
        "answers": [sample["resps"][0][0] for sample in samples["harbour_answers"]],
        "tidewatch": {
            "loglikelihood": rounded(lm_512.loglikelihood_rolling([request]))[0],
            "nlls": rounded(token_nlls(lm_512, text, WINDOW)),
        },
        "results": {
            task: {
                name: float(metric)
                for name, metric in metrics.items()
                if "," in name and "stderr" not in name and isinstance(metric, (int, float))
            }
            for task, metrics in found["results"].items()
        },
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
    (HERE / "harness.json").write_text("{\n" + lines + "\n}\n")
    print(value["results"], (HERE / "harness.json").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
