"""Fields that left, by their dotted path, each with its successor."""

REMOVED: dict[str, str] = {
    "recommendation_slates": "left: take recommendation_quick, whose policy ranks the catalogue",
    "sampling.group": "left: a group is always made of independent samples",
    "task.listed": "left: rankings score every item of the catalogue",
    "task.semantic_ids": "left: task.writes title or item",
    "task.item_start": "left: items' own words begin as the vectors of their titles",
    "task.training_targets": "left: every position of a history is trained",
    "task.pairs": "left: what the warm start teaches follows from task.writes",
    "task.pair_characters": "left with task.pairs",
    "task.exclude_history": "left: rankings leave the history out",
    "task.decay": "left: the decayed baselines take 0.7",
    "task.dummy_length": "is no setting any more: 8",
    "task.dummy_fickle": "is no setting any more: 0.1",
    "task.dummy_noise": "is no setting any more: 0.02",
    "task.dummy_seed": "is no setting any more: 0",
    "data.streaming": "left: data files of any size are mapped into memory; give data.prompts alone",
    "data.shuffle_buffer": "left with data.streaming: the order is shuffled over the whole data set",
    "data.curriculum": "left: sort the prompts into several files and train on one after another",
    "data.informative_half_life": "left: use algorithm.dead_groups resample or drop",
}
