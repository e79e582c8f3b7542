// Streams an answer: node chat.mjs [QUESTION] [HOST:PORT]
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [question = "Why is the sky blue?", address = "localhost:8001"] = process.argv.slice(2);

const definition = protoLoader.loadSync("pagewire/v1/inference.proto", {
  includeDirs: [new URL("../../protos", import.meta.url).pathname],
  keepCase: true,
  enums: String,
  defaults: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).pagewire.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());

const call = client.Generate({
  chat: { messages: [{ role: "user", content: question }] },
  sampling_params: { max_tokens: 64, temperature: 0 },
});
call.on("data", (response) => {
  process.stdout.write(response.text);
  if (response.finish_reason !== "FINISH_REASON_UNSPECIFIED") {
    console.log(`\n[${response.finish_reason}, ${response.usage.completion_tokens} tokens]`);
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
