"""Fields that left, by their dotted path, each with its successor."""

REMOVED: dict[str, str] = {
    "data.streaming": "left: data files of any size are mapped into memory; give data.prompts alone",
    "data.shuffle_buffer": "left with data.streaming: the order is shuffled over the whole data set",
    "data.curriculum": "left: sort the prompts into several files and train on one after another",
    "data.informative_half_life": "left: use algorithm.dead_groups resample or drop",
    "training.memory_budget_gib": "left: --plan says what an update takes; set training.accumulation",
    "task.answer": "left: answers are text; judges.renderer sets guidance and steps for all pictures",
    "task.negative_prompt": "left: set judges.renderer.negative_prompt",
    "task.guidance": "left: set judges.renderer.guidance",
    "task.steps": "left: set judges.renderer.steps",
    "task.see_source": "left with pictures drawn from pictures",
    "task.kind.prompt_recreation": "left: use prompt_refinement",
    "config.prompt_recreation_miniature": "left: use prompt_refinement_miniature",
    "config.prompt_recreation_sd3": "left: use prompt_refinement_sd3",
    "config.prompt_refinement_scenes": "left: use prompt_refinement_miniature or prompt_enhancement_scenes",
    "judges.kind.dino": "left: use examples/judges/dino.py:Dino",
    "judges.kind.ocr": "left: use examples/judges/ocr.py:Ocr",
    "judges.kind.open_nsfw": "left: use examples/judges/open_nsfw.py:OpenNsfw",
    "judges.kind.image_to_image": "left: use text_to_image",
    "judges.renderer.scheduler": "left: the pipeline's own, set in its folder's scheduler_config.json",
    "judges.renderer.scheduler_options": "left: the pipeline's own, set in its folder's scheduler_config.json",
}
