"""What all operators share: tags in the program, and how codes are kept between the passes."""
