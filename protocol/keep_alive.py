"""When the kernel asks for a sign of life on a connection of the network. It also keeps routers from forgetting it."""

SILENCE_S = 30  # after which it asks first
ASK_AGAIN_S = 10  # between two questions
NUM_QUESTIONS = 3  # after which the other side counts as vanished
