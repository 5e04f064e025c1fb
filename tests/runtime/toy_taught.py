"""The enumerable toy with two teachers: policies of other logits."""

from dataclasses import replace

from counting_teacher import TabularTeacher

from tba.training.teacher import Teacher
from toy.recipe import recipe as toy
from toy.recipe import task

teachers = [replace(task, seed=seed) for seed in (7, 8)]
weights = (0.4, 0.3)
recipe = replace(
    toy,
    name="toy_taught",
    teacher=Teacher(weights=weights, models=tuple(TabularTeacher(other) for other in teachers)),
)
