"""The laboratory: measure, predict, draw, check an exercise. It looks at minserve; nothing looks back."""
