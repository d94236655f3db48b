"""The input and output models of the API.

An In model forbids unknown fields.  Each Out model has an example, which the OpenAPI page shows.
Durations and charges are integer microseconds (`_us`).  Weights and costs are thousandths in the
tables and plain numbers here.
"""
