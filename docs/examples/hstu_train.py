"""A small HSTU ranking model under several thread presets, and in a loop without overlap."""

import torch
from hstu_model import HSTURanking, RankingConfig, SequenceBatch, generate_ratings

from swpipe.tasks.torchrec.hstu import HSTUPipelineFactory

config = RankingConfig(items=200)
histories = generate_ratings(users=192, items=200, longest=config.longest, seed=0)
batches = [SequenceBatch.of(histories[k : k + 16]) for k in range(0, 192, 16)]


def train(**options):
    model = HSTURanking(config)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=config.learning_rate)
    means = []
    with HSTUPipelineFactory.create(
        "hstu_prefetch_sparse_dist",
        model=model,
        optimizer=optimizer,
        device=torch.device("cpu"),
        **options,
    ) as pipe:
        iterator = iter(batches)  # once: the batches in flight belong to it
        while True:
            try:
                loss, tokens, _ = pipe.progress(iterator)
            except StopIteration:
                return torch.stack(means)
            means.append(loss / tokens)


plain = train(threaded=False)
print("the loss falls:", bool(plain[-3:].mean() < plain[:3].mean()))
for threads in ("default", "by_stream", "io_data_dist_prefetch_compute"):
    print(f"{threads}, three batches ahead: same losses:", end=" ")
    print(torch.equal(plain, train(thread_map=threads, prefetch_depth=3)))
