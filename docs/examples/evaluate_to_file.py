"""An evaluation that writes a file: texts are tokenized ahead, labels are written behind."""

import json
from pathlib import Path

import torch

import swpipe
from swpipe import on_caller

texts = [
    [f"text {k} has {'many ' * (k % 5)}words" for k in range(i, i + 4)] for i in range(0, 80, 4)
]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(128, 16), torch.nn.Linear(16, 3)).eval()


def tokenize(batch):
    """Return the bytes of each text, padded with spaces."""
    width = max(map(len, batch))
    return batch, torch.tensor([[*text.ljust(width).encode()] for text in batch])


def predict(batch):
    texts, tokens = batch
    return texts, model(tokens)


def label(out):
    texts, scores = out
    labels = scores.argmax(1).tolist()
    return [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]


with Path("predictions.jsonl").open("w") as file, torch.inference_mode():

    def write(lines):
        file.writelines(json.dumps(line) + "\n" for line in lines)
        return len(lines)

    written = sum(swpipe.through(texts, tokenize, on_caller(predict), label, write))

lines = Path("predictions.jsonl").read_text().splitlines()
print(written, "predictions in", len(lines), "lines; the first:", lines[0])
