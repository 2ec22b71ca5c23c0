"""Export checkpoints to ONNX Runtime GenAI and run them. Run in an environment of its own: JOBS (a JSON file)."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime_genai as og
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3]))
import compress

NEW_TOKENS = 8


def read(folder, ids, out):
    """Write the log-probabilities of every next token [positions, vocabulary], and the first greedy tokens."""
    prompt = load_file(ids)["ids"][0].to(torch.int32).numpy()
    exported = Path(f"{folder}-onnx")
    compress.export(folder, exported, "onnx")
    model = og.Model(str(exported))
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + NEW_TOKENS, do_sample=False)
    generator = og.Generator(model, options)
    generator.append_tokens(prompt)
    logits = torch.as_tensor(np.asarray(generator.get_output("logits")))[0].float()
    greedy = []
    for _ in range(NEW_TOKENS):
        generator.generate_next_token()
        greedy.append(int(generator.get_next_tokens()[0]))
    tensors = {"log_probabilities": logits[:-1].log_softmax(-1).contiguous(), "greedy": torch.tensor(greedy)}
    save_file(tensors, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
