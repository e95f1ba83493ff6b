"""What Dynamo's graph tells before it is traced: its inputs, their names, and the models that own them."""
