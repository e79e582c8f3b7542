"""stub"""


async def pulled(tokenizer, body):
    raise NotImplementedError
