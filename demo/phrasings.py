"""The phrasings of the demo model's questions, as people type them.

Owns text only: each block is a list of phrases parted by `|`, whose spelling and capitals rephrase() in questions.py
then varies. Placeholders: n a name, c a colour, a a name with its article, p a plural, r a relation.
"""


def phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


LIST_TEXTS = phrases(
    "what is in the picture?|what is in this picture?|what's in the picture?|what do you see?|"
    "what can you see?|what do you see in the picture?|what can you see in this picture?|what is this?|"
    "describe the picture.|describe this picture.|describe what you see.|what is shown?|"
    "what does the picture show?|what does this picture show?|what is shown in the picture?|"
    "what shapes are in the picture?|which shapes are there?|what shapes are there?|which shapes do you see?|"
    "what shapes do you see?|list the shapes.|list the shapes in the picture.|list all shapes.|"
    "list everything in the picture.|name the shapes.|name all the shapes in the picture.|"
    "what are the shapes?|tell me what is in the picture.|tell me what you see.|"
    "what objects are in the picture?|describe.|can you describe the picture?|please describe the picture.|"
    "what is there?|what shapes can you see?|what is in here?|what are these?|what is depicted?|"
    "what is in the picture|give me a description.|what shapes and colours are in the picture?|"
    "describe the shapes.|describe the scene.|what is visible?"
)

COLOUR_TEXTS = phrases(
    "what colour is the {n}?|what colour is the {n}?|what is the colour of the {n}?|which colour is the {n}?|"
    "what's the colour of the {n}?|which colour does the {n} have?|what colour does the {n} have?|"
    "the {n} is what colour?|tell me the colour of the {n}.|name the colour of the {n}.|colour of the {n}?|"
    "what colour is the {n} in the picture?|what is the {n}'s colour?|which colour has the {n}?|"
    "can you tell me what colour the {n} is?|in what colour is the {n}?|what colour {n} is there?|"
    "what colour is the {n} in this picture?|there is a {n} in the picture. what colour is it?"
)

COLOUR_ONLY_TEXTS = phrases(
    "what colour is the shape?|what colour is it?|what is the colour of the shape?|which colour is it?|"
    "what colour is this?|what colour is this shape?|what colour is the object?|which colour is the shape?"
)

SHAPE_TEXTS = phrases(
    "what shape is {c}?|which shape is {c}?|what is {c}?|what shape is the {c} one?|what is the {c} shape?|"
    "what shape is the {c} object?|which shape is {c} in the picture?|what kind of shape is {c}?|"
    "what is the shape of the {c} object?|what shape has the colour {c}?|"
    "what shape does the {c} object have?|what {c} shape is there?|which {c} shape is in the picture?|"
    "the {c} shape is what?|name the {c} shape.|what {c} shape do you see?|what is the {c} thing?|"
    "tell me which shape is {c}.|what is the {c} object?|what shape is {c} in this picture?|"
    "what kind of shape is the {c} one?|what shape is the {c} shape?"
)

SHAPE_ONLY_TEXTS = phrases(
    "what shape is it?|what shape is this?|which shape is it?|what kind of shape is it?|"
    "what shape is in the picture?|what shape do you see?|which shape is this?|what shape is shown?"
)

WHERE_TEXTS = phrases(
    "where is the {n}?|where is the {n}?|where is the {n} in the picture?|where can i find the {n}?|"
    "where is the {n} located?|in which part of the picture is the {n}?|what is the position of the {n}?|"
    "where do you see the {n}?|tell me where the {n} is.|in which region is the {n}?|where's the {n}?|"
    "where in the picture is the {n}?|what position is the {n} in?|which part of the picture has the {n}?|"
    "where is the {n} placed?|where is the {n} in this picture?|locate the {n}.|position of the {n}?"
)

COUNT_TEXTS = phrases(
    "how many shapes are there?|how many shapes are there?|how many shapes are in the picture?|"
    "how many shapes do you see?|how many shapes can you see?|count the shapes.|how many objects are there?|"
    "how many objects are in the picture?|what is the number of shapes?|how many shapes?|how many are there?|"
    "how many figures are there?|how many things are in the picture?|how many shapes does the picture have?|"
    "how many shapes are in this picture?|count the shapes in the picture.|how many shapes are shown?|"
    "how many objects do you see?|how many shapes in total?|tell me how many shapes there are."
)

COUNT_NAME_TEXTS = phrases(
    "how many {p} are there?|how many {p} are there?|how many {p} are in the picture?|"
    "how many {p} do you see?|how many {p} can you see?|count the {p}.|how many {p}?|"
    "what is the number of {p}?"
)

EXISTS_TEXTS = phrases(
    "is there {a}?|is there {a}?|is there {a} in the picture?|do you see {a}?|can you see {a}?|"
    "is {a} in the picture?|does the picture have {a}?|does the picture contain {a}?|is {a} there?|"
    "do you see {a} in the picture?|does the picture show {a}?|is {a} present?|is there {a} here?|"
    "can you find {a}?|is there {a} in this picture?|is there any {n}?|are there any {p}?|"
    "are there any {p} in the picture?|does this picture contain {a}?|can you see any {p}?"
)

COLOUR_EXISTS_TEXTS = phrases(
    "is there anything {c}?|is there something {c}?|is anything {c}?|do you see anything {c}?|"
    "is there a {c} shape?|is any shape {c}?|is there something {c} in the picture?|is one of the shapes {c}?"
)

RELATION_TEXTS = phrases(
    "is the {a} {r} the {b}?|is the {a} {r} the {b}?|is the {a} {r} the {b}?|"
    "is the {a} {r} the {b} in the picture?|do you see the {a} {r} the {b}?|"
    "would you say the {a} is {r} the {b}?|can you see the {a} {r} the {b}?|"
    "is it true that the {a} is {r} the {b}?|the {a} is {r} the {b}, right?|is the {a} placed {r} the {b}?"
)

RELATIVE_TEXTS = phrases(
    "where is the {a} relative to the {b}?|where is the {a} compared to the {b}?|"
    "where is the {a} from the {b}?|what is the position of the {a} relative to the {b}?|"
    "where is the {a} with respect to the {b}?"
)

WHICH_TEXTS = phrases(
    "what is {r} the {b}?|which shape is {r} the {b}?|what shape is {r} the {b}?|what do you see {r} the {b}?"
)

SIDE = {
    "left": ("left of", "to the left of", "on the left of", "on the left side of"),
    "right": ("right of", "to the right of", "on the right of", "on the right side of"),
    "above": ("above", "above", "over", "higher than"),
    "below": ("below", "below", "under", "lower than", "beneath", "underneath"),
}

CHOICE_TEXTS = {
    "x": phrases(
        "is the {a} left or right of the {b}?|is the {a} to the left or to the right of the {b}?|"
        "is the {a} right or left of the {b}?|on which side of the {b} is the {a}?"
    ),
    "y": phrases(
        "is the {a} above or below the {b}?|is the {a} below or above the {b}?|is the {a} over or under the {b}?"
    ),
}
