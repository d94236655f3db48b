import createClient from "openapi-fetch";
import type { paths } from "./api.js";

const [url] = process.argv.slice(2);
const client = createClient<paths>({
  baseUrl: url,
  headers: { Authorization: `Bearer ${process.env.ROUNDHOUSE_KEY}` },
});
const body = { tasks: [{ name: "t", run: { command: ["true"] } }] };
const { data, error } = await client.POST("/v1/requests", { body });
if (!data) throw new Error(JSON.stringify(error));
let state: string = data.state;
while (state === "queued" || state === "running") {
  const read = await client.GET("/v1/requests/{id}", {
    params: { path: { id: data.id }, query: { wait: "3s" } },
  });
  if (!read.data) throw new Error(JSON.stringify(read.error));
  state = read.data.state;
}
console.log(state);
