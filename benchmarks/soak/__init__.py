"""A long run that is killed many times: does it end with the bits of an unbroken one?"""
