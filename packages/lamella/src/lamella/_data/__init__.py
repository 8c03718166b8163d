"""From files of text or conversations to the tokens of a step: documents, tokenizer, packing, order."""
