# Streams an answer: ruby chat.rb [QUESTION] [HOST:PORT]
$LOAD_PATH.unshift File.join(__dir__, "stubs")
require "pagewire/v1/inference_services_pb"

question = ARGV[0] || "Why is the sky blue?"
stub = Pagewire::V1::InferenceService::Stub.new(ARGV[1] || "localhost:8001", :this_channel_is_insecure)

message = Pagewire::V1::ChatMessage.new(role: "user", content: question)
request = Pagewire::V1::GenerateRequest.new(
  chat: Pagewire::V1::ChatPrompt.new(messages: [message]),
  sampling_params: Pagewire::V1::SamplingParams.new(max_tokens: 64, temperature: 0)
)
begin
  stub.generate(request).each do |response|
    print response.text
    next if response.finish_reason == :FINISH_REASON_UNSPECIFIED

    puts "\n[#{response.finish_reason}, #{response.usage.completion_tokens} tokens]"
  end
rescue GRPC::BadStatus => error
  abort error.message
end
