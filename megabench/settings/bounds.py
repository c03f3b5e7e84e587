"""Types of settings with bounds. Upper bounds are far above any real run; larger values are typing errors."""

from typing import Annotated

from pydantic import Field

NumRanks = Annotated[int, Field(ge=1, le=2**17)]
NumLayers = Annotated[int, Field(ge=1, le=10_000)]
NumLayersOrZero = Annotated[int, Field(ge=0, le=10_000)]
NumTokens = Annotated[int, Field(ge=1, le=2**24)]
NumSequences = Annotated[int, Field(ge=1, le=2**24)]
MatrixRank = Annotated[int, Field(ge=1, le=2**16)]
NumElements = Annotated[int, Field(ge=0, le=10**12)]
NumSteps = Annotated[int, Field(ge=1, le=10**9)]
NumStepsOrZero = Annotated[int, Field(ge=0, le=10**9)]
NumRepeats = Annotated[int, Field(ge=1, le=1000)]
Multiple = Annotated[float, Field(gt=1, le=10**6)]
Seconds = Annotated[float, Field(gt=0, le=10**7)]
LearningRate = Annotated[float, Field(gt=0, le=1000)]
FinalLearningRate = Annotated[float, Field(ge=0, le=1000)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
WeightDecay = Annotated[float, Field(ge=0, le=100)]
GradientNorm = Annotated[float, Field(ge=0, le=10**6)]
