"""Export checkpoints to OpenVINO and run them. Run in an environment of its own: JOBS (a JSON file)."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3]))
import compress

NEW_TOKENS = 8
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def read(folder, ids, out):
    """Write the log-probabilities of every next token [positions, vocabulary], and the first greedy tokens."""
    prompt = load_file(ids)["ids"].numpy()
    exported = Path(f"{folder}-openvino")
    compress.export(folder, exported, "openvino")
    model = ov.Core().compile_model(exported / "openvino_model.xml", "CPU", EXACT)
    request, beam, past = model.create_infer_request(), np.zeros(1, dtype=np.int32), 0

    def step(tokens):
        nonlocal past
        places = np.arange(past, past + tokens.shape[1])[None]
        past += tokens.shape[1]
        mask = np.ones((1, past), dtype=np.int64)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places, "beam_idx": beam}
        return torch.tensor(request.infer(inputs)["logits"])[0].float()

    logits, greedy = step(prompt), []
    last = logits
    for _ in range(NEW_TOKENS):
        greedy.append(int(last[-1].argmax()))
        last = step(np.array([[greedy[-1]]]))
    save_file({"log_probabilities": logits[:-1].log_softmax(-1).contiguous(), "greedy": torch.tensor(greedy)}, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
