"""The enumerable toy with a teacher whose whole distribution is learnt, whatever the answers."""

from dataclasses import replace

from counting_teacher import TabularTeacher
from toy_taught import recipe as taught
from toy_taught import teachers

from tba.objectives.distil import Distil
from tba.training.teacher import Teacher

recipe = replace(
    taught,
    name="toy_distilled",
    objective=Distil(),
    teacher=Teacher(models=(TabularTeacher(teachers[0]),), top=teachers[0].symbols + 1, reward=False),
)
