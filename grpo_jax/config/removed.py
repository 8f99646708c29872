"""Fields that left, by their dotted path, each with its successor."""

REMOVED: dict[str, str] = {
    "rewards.isolated": "left: use a judge of kind function in a pool of one actor (judges.NAME.replicas 1)",
    "task.isolated": "left: environments run in threads of the run, with judge_timeout as their limit",
    "data.streaming": "left: data files of any size are mapped into memory; give data.prompts alone",
    "data.shuffle_buffer": "left with data.streaming: the order is shuffled over the whole data set",
    "data.curriculum": "left: sort the prompts into several files and train on one after another",
    "data.informative_half_life": "left: use algorithm.dead_groups resample or drop",
}
