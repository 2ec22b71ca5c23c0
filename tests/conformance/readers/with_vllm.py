"""Run checkpoints in vLLM on the CPU, in the dtype of the job. Run in an environment of its own: JOBS (a JSON file)."""

import gc
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

NEW_TOKENS = 8


def read(folder, ids, out, dtype):
    """Write the log-probabilities of every next token [positions, vocabulary], and the first greedy tokens."""
    prompt = load_file(ids)["ids"][0].tolist()
    model = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=len(prompt) + NEW_TOKENS,
        max_num_seqs=1,
        max_logprobs=-1,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    options = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=-1, ignore_eos=True, detokenize=False
    )
    (answer,) = model.generate({"prompt_token_ids": prompt}, options, use_tqdm=False)
    rows = [[row[token].logprob for token in range(len(row))] for row in answer.prompt_logprobs[1:]]
    tensors = {"log_probabilities": torch.tensor(rows), "greedy": torch.tensor(answer.outputs[0].token_ids)}
    save_file(tensors, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"], job["dtype"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
    gc.collect()
