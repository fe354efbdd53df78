"""Programs, models and trainers of other people, with actjax put into them."""
