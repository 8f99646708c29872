"""A detector against transformers itself, and GenEval's rules against a plain reading of them."""

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("open_clip")

from support import tiny_models  # noqa: E402
from support.vision.judged import noise, pillow  # noqa: E402

from bridges.judges.clip_model import ClipModel  # noqa: E402
from bridges.judges.object_detection import (  # noqa: E402
    COLOUR_TEXTS,
    COLOURS,
    RELATIONS,
    ObjectDetection,
    relations,
    requirements_met,
)
from grpo_jax.errors import UserError  # noqa: E402
from grpo_jax.tasks.pictures import geneval  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("judges")
    return tiny_models.detector(place / "detector"), tiny_models.clip_model(place / "clip")


@torch.no_grad()
def of_transformers(folder, image, threshold):
    """Boxes by name, the surest first, of one picture by itself."""
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    outputs = model(**processor(images=pillow(image), return_tensors="pt"))
    (found,) = processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=[image.shape[-2:]])
    by_name = {name: [] for name in model.config.id2label.values()}
    for place in found["scores"].argsort(descending=True).tolist():
        by_name[model.config.id2label[int(found["labels"][place])]].append(found["boxes"][place].double().numpy())
    return by_name


def test_objects_are_those_of_transformers_whatever_else_is_in_the_batch(folders):
    images, threshold = noise(7), 0.5
    judge = ObjectDetection(path=str(folders[0]), threshold=threshold, batch_size=3).load("cpu")
    expected = [of_transformers(folders[0], image, threshold) for image in images]
    counts = [{name: len(boxes) for name, boxes in found.items()} for found in expected]
    assert len({tuple(count.values()) for count in counts}) > 1
    for name, least in itertools.product(("dog", "mouse", "red ball"), (1, 2, 3)):
        requests = [{"include": [{"class": name, "count": least}]}] * 7
        assert judge.geneval(images, requests, None) == [float(count[name] >= least) for count in counts]
        requests = [{"exclude": [{"class": name, "count": least}], "tag": "single_object"}] * 7
        assert judge.geneval(images, requests, None) == [float(count[name] < least) for count in counts]
    sure = [len(of_transformers(folders[0], image, 0.9)["dog"]) for image in images]
    counting = [{"include": [{"class": "dog", "count": 1}], "tag": "counting"}] * 7
    assert judge.geneval(images, counting, None) == [float(count >= 1) for count in sure]
    assert str(judge) == f"{folders[0]}: YolosForObjectDetection, 3 kinds, on cpu"


def test_labels_of_pascal_voc_answer_to_geneval_s_names(folders, tmp_path):
    """As the published RT-DETR has them."""
    image = noise(1)
    tiny_models.detector(tmp_path, ("sofa", "motorbike", "tvmonitor"))
    plain, voc = (ObjectDetection(path=str(folder)).load("cpu") for folder in (folders[0], tmp_path))
    assert voc.names == ("couch", "motorcycle", "tv")
    for name, other in zip(plain.names, voc.names, strict=True):
        wanted = [[{"include": [{"class": kind, "count": 1}]}] for kind in (name, other)]
        assert plain.geneval(image, wanted[0], None) == voc.geneval(image, wanted[1], None)


def test_a_colour_is_the_likeliest_of_the_crop(folders):
    image = noise(1)[0]
    found = of_transformers(folders[0], image, 0.3)
    name, boxes = max(found.items(), key=lambda entry: len(entry[1]))
    left, top, right, bottom = boxes[0]
    crop = image[None, :, max(int(top), 0) : int(np.ceil(bottom)), max(int(left), 0) : int(np.ceil(right))]
    clip = ClipModel(path=str(folders[1])).load("cpu")
    cosines = []
    for colour in COLOURS:
        mean = clip.text_features([text.format(colour=colour, name=name) for text in COLOUR_TEXTS]).mean(0)
        cosines.append(float((clip.image_features(crop)[0] * mean / mean.norm()).sum()))
    judge = ObjectDetection(path=str(folders[0])).load("cpu")
    asked = [{"include": [{"class": name, "count": 1, "color": colour}]} for colour in COLOURS]
    expected = [float(place == int(np.argmax(cosines))) for place in range(len(COLOURS))]
    images = image.expand(len(COLOURS), -1, -1, -1)
    assert judge.geneval(images, asked, clip) == expected and sum(expected) == 1
    with pytest.raises(UserError, match=r"a colour is asked for: judges.scorer must compare pictures and texts"):
        judge.geneval(images, asked, object())


def relations_plainly(a, b, apart):
    """How a stands to b, word for word as GenEval has it, in numbers alone."""
    boxes = [[float(value) for value in box] for box in (a, b)]
    centres = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes]
    sizes = [(abs(right - left), abs(bottom - top)) for left, top, right, bottom in boxes]
    offset = [centres[0][axis] - centres[1][axis] for axis in range(2)]
    revised = []
    for axis in range(2):
        size = max(abs(offset[axis]) - apart * (sizes[0][axis] + sizes[1][axis]), 0)
        revised.append(size if offset[axis] > 0 else -size)
    if all(abs(value) < 1e-3 for value in revised):
        return set()
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    words = set()
    for axis, (low, high) in enumerate((("left of", "right of"), ("above", "below"))):
        if revised[axis] / length < -0.5:
            words.add(low)
        if revised[axis] / length > 0.5:
            words.add(high)
    return words


def correct_plainly(found, request, colours_of, apart):
    """GenEval's `evaluate`: whether all of a request is there."""
    correct, groups = True, []
    for wanted in request.get("include", []):
        matched = True
        objects = found.get(wanted["class"], [])[: wanted["count"]]
        if len(objects) < wanted["count"]:
            correct = matched = False
        else:
            if "color" in wanted and colours_of(objects, wanted["class"]).count(wanted["color"]) < wanted["count"]:
                correct = matched = False
            if "position" in wanted and matched:
                relation, target = wanted["position"]
                if groups[target] is None:
                    correct = matched = False
                else:
                    for one in objects:
                        for other in groups[target]:
                            if relation not in relations_plainly(one, other, apart):
                                correct = matched = False
        groups.append(objects if matched else None)
    for unwanted in request.get("exclude", []):
        if len(found.get(unwanted["class"], [])) >= unwanted["count"]:
            correct = False
    return correct


def test_the_rules_are_geneval_s():
    draw = random.Random(0)
    verdicts, seen = [], set()
    for _ in range(4000):
        boxes = {name: [] for name in ("dog", "cat")}
        for name in boxes:
            for _ in range(draw.randrange(4)):
                x, y, width, height = (draw.randrange(1, 12) for _ in range(4))
                boxes[name].append(np.array([x, y, x + width, y + height], float))
        colours = {id(box): draw.choice(("red", "blue")) for group in boxes.values() for box in group}

        def colours_of(objects, name, colours=colours):
            return [colours[id(one)] for one in objects]

        include = []
        for place in range(draw.randrange(1, 3)):
            wanted = {"class": draw.choice(("dog", "cat")), "count": draw.choice((1, 1, 2))}
            if draw.random() < 0.4:
                wanted["color"] = draw.choice(("red", "blue"))
            if place and draw.random() < 0.7:
                wanted["position"] = [draw.choice(RELATIONS), 0]
            include.append(wanted)
        exclude = [{"class": draw.choice(("dog", "cat")), "count": draw.randrange(1, 4)}] * draw.randrange(2)
        request = {"include": include, "exclude": exclude}
        met = requirements_met(boxes, request, colours_of)
        assert len(met) == len(include) + len(exclude)
        expected = correct_plainly(boxes, request, colours_of, 0.1)
        assert all(met) == expected
        verdicts.append(expected)
        for a, b in itertools.product(boxes["dog"], boxes["cat"]):
            words = relations(a, b)
            assert words == relations_plainly(a, b, 0.1)
            seen.add(frozenset(words))
    assert 0.1 < np.mean(verdicts) < 0.9 and len(seen) == 9  # none, four, and four across


def test_part_of_what_is_asked_can_earn_and_nothing_asked_is_missing(folders):
    images = noise(2)
    there = max(of_transformers(folders[0], images[0], 0.3).items(), key=lambda entry: len(entry[1]))[0]
    include = [[{"class": there, "count": 1}, {"class": there, "count": 9}], None]
    for partial, earned in ((True, 0.5), (False, 0.0)):
        judge = ObjectDetection(path=str(folders[0]), partial=partial).load("cpu")
        assert geneval(images=images, include=include, detector=judge, scorer=None) == [earned, None]


def test_what_is_asked_wrongly_is_one_line(folders, tmp_path):
    judge = ObjectDetection(path=str(folders[0])).load("cpu")
    include = {"class": "dog", "count": 1}
    for wrong, said in (
        ([{"class": "computer mouze", "count": 1}], "include: the detector knows no 'computer mouze'; did you mean"),
        ([{"class": "dog", "count": "2"}], r'include: expected {"class": name, "count": number}, got'),
        ([{"class": "dog", "color": "rde"}], "include: expected a colour, red, orange"),
        ([include | {"position": ["left of", 0]}], r"expected a position \[left of \| right of"),
        ([include, include | {"position": ["behind", 0]}], "expected a position"),
    ):
        with pytest.raises(UserError, match=said):
            judge.geneval(noise(1), [{"include": wrong}], None)
    assert judge.geneval(noise(1), [{"include": [{"class": "computer mouse", "count": 9}]}], None) == [0.0]
    with pytest.raises(UserError, match="expected a model that detects objects"):
        ObjectDetection(path=str(folders[1])).load("cpu")
