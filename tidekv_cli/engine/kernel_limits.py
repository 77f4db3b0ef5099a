"""What flash kernels ask of a head, known without torch."""

MOST_HEAD_DIM, HEAD_DIM_STEP = 256, 8
