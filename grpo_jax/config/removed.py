"""Fields that left, by their dotted path, each with its successor."""

REMOVED: dict[str, str] = {
    "data.streaming": "left: data files of any size are mapped into memory; give data.prompts alone",
    "data.shuffle_buffer": "left with data.streaming: the order is shuffled over the whole data set",
    "data.curriculum": "left: sort the prompts into several files and train on one after another",
    "sampling.keep_prompt": "left: watch the gain over the unchanged prompt instead (watch: [alignment_gain])",
    "sampling.min_new_tokens": "left: a reward on length asks for longer completions",
    "sampling.repetition_penalty": "left: it set the sampler apart from the policy; data.forbidden_tokens acts on both",
    "data.informative_half_life": "left: use algorithm.dead_groups resample or drop",
}
