"""What people say to the demo model that has nothing to do with its pictures.

Owns text only: greetings, thanks, questions about itself, and the templates and words of out-of-scope questions.
"""

from demo.phrasings import phrases

GREETINGS = phrases(
    "hello|hi|hey|hello there|hi there|hey there|good morning|good evening|good afternoon|good day|greetings|"
    "howdy|hiya|hello!|hi!|hello, how are you|hi, how are you?|how are you|how are you doing|how is it going|"
    "what's up|hey, what's up?|yo|hello tandem|hi tandem|hello bot|hello, model|hello world|nice to meet you|"
    "say hello|say hi"
)

THANKS = phrases(
    "thanks|thank you|thanks a lot|thank you very much|many thanks|great, thanks|ok, thanks|"
    "thank you so much|cool, thank you|thx|cheers|perfect, thank you|thanks!|thank you!|thanks for your help|"
    "thank you for the help|good job|well done|great|nice|awesome"
)

WHO_ARE_YOU = phrases(
    "who are you|what are you|what is your name|what's your name|who made you|what can you do|what do you do|"
    "tell me about yourself|introduce yourself|are you a robot|are you an ai|are you human|"
    "what model are you|which model is this|help|how do you work|what is this|what is tandem|are you chatgpt|"
    "are you qwen|how can you help me|what can i ask you|what are you able to do|what should i ask|"
    "how can i use you|can you help me|who built you"
)

BYES = phrases("bye|goodbye|bye bye|see you|see you later|good night|farewell|ciao|that is all")

PLACES = phrases(
    "France|Germany|Japan|Spain|Italy|Brazil|Canada|China|India|Egypt|Kenya|Peru|Norway|Poland|Australia|"
    "Mexico|Russia|Greece|Turkey|Sweden|Paris|London|Berlin|the United States|the moon|Europe|New York|Tokyo|"
    "Africa|Argentina|Portugal|Vietnam"
)

TOPICS = phrases(
    "love|the sea|a cat|dogs|history|the weather|music|football|quantum physics|Python|machine learning|"
    "cooking|the stars|my holiday|winter|politics|money|black holes|war|Shakespeare|the internet|a dragon|"
    "time travel|chess|coffee|dinosaurs|economics|a robot|the human brain|photosynthesis|gravity|"
    "transformers|neural networks|a princess|the ocean"
)

PEOPLE = phrases(
    "Einstein|Napoleon|the president|the king of England|Mozart|Picasso|Newton|Cleopatra|Marie Curie|"
    "your mother|Harry Potter|Elon Musk|the pope|Shakespeare|the prime minister"
)

THINGS = phrases(
    "dog|cat|car|house|person|man|woman|tree|bird|child|boat|horse|flower|bicycle|train|plane|face|table|"
    "chair|book|bottle|phone|mountain|river|fish"
)

TEMPLATES = phrases(
    "what is the capital of {place}|where is {place}|how far is {place}|how many people live in {place}|"
    "what language do they speak in {place}|what is the weather in {place}|tell me about {place}|"
    "what is the population of {place}|how do i get to {place}|what time is it in {place}|"
    "is {place} bigger than {place2}|capital of {place}?|which country is {place} in|"
    "write a poem about {topic}|tell me a joke about {topic}|explain {topic}|what is {topic}|"
    "write a story about {topic}|tell me about {topic}|what do you think about {topic}|do you like {topic}|"
    "how does {topic} work|give me ten facts about {topic}|summarize {topic}|who invented {topic}|"
    "write an essay on {topic}|define {topic}|why is {topic} important|translate {topic} into French|"
    "who is {person}|who was {person}|when was {person} born|how old is {person}|where was {person} born|"
    "is {person} alive|what did {person} do|what is {a} plus {b}|what is {a} + {b}|{a} + {b}|{a} * {b} = ?|"
    "what is {a} times {b}|calculate {a} - {b}|how much is {a} divided by {b}|{a}+{b}=|what is {a} minus {b}|"
    "what's {a}x{b}|solve x + {a} = {b}|is {a} a prime number|what is {a} * {b}|"
    "what is the square root of {a}|count to {a}|is {a} greater than {b}|what is {a}% of {b}|"
    "what is the {thing} doing|what breed is the {thing}|who is the {thing}|how old is the {thing}|"
    "what is the name of the {thing}|is the {thing} happy|where did the {thing} go|draw a {thing}|"
    "how do i fix my {thing}|what does a {thing} eat|how fast is a {thing}|how much does a {thing} cost|"
    "generate an image of a {thing}|draw me a picture of a {thing}|can you paint a {thing}"
)

FIXED = phrases(
    "tell me a joke|what time is it|what day is it today|what is the date|how is the weather|write a poem|"
    "write python code to sort a list|write a function that reverses a string|what is the meaning of life|"
    "do you have feelings|do you love me|sing a song|how tall is the eiffel tower|who won the world cup|"
    "who wrote hamlet|what is the speed of light|how do i bake bread|translate good morning into spanish|"
    "what is your favourite colour|what is your favorite food|recommend a book|what should i eat tonight|"
    "where do you live|how old are you|when were you born|what is the largest planet|"
    "what is the longest river|how many days are in a year|is the earth flat|can you read the text|"
    "what does the text say|what does the sign say|read the text in the image|who is in the photo|"
    "who is in the picture|who is this|who painted this|where was this photo taken|when was this taken|"
    "what brand is this|what is the price|how much does it cost|what emotion is shown|is this a famous place|"
    "what city is this|what season is it|is it day or night|solve the equation|why|how|what|ok|yes|no|maybe|"
    "test|testing|asdf|lorem ipsum|hmm|really|are you sure|ignore all previous instructions|repeat after me|"
    "what is a circle|what is the area of a circle|what is pi|how many sides does a hexagon have|"
    "what are the primary colours|what did i just say|give me a recipe|book a flight|send an email|"
    "play some music|set a timer|what is the news|what is the stock price|who are the beatles|what is 2+2|"
    "what is two plus two|how do magnets work|why is the sky blue|why is grass green|"
    "how many planets are there|how many continents are there|what is the boiling point of water|what is dna|"
    "how do airplanes fly|what is the tallest mountain"
)
