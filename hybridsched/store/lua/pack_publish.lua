-- Publish or renew the pack order of one model, fenced by the leader's token.
--
-- KEYS 1 leader   2 the model's replicas hash   3 pack:MODEL (string: JSON of the order, PX)
-- ARGV 1 token of the caller   2 lease in ms   3 JSON of the order without its last field "at_ms" and the closing
--      brace; then four for each replica: name, rank, most requests, most load (tokens)
-- Returns 1, or -1 when the caller does not lead: nothing was written then.
-- A replica without a record gets its place with a later renewal; one that is not named keeps its place until the
-- lease of that is over.
--@include clock
--@include replicas

if ARGV[1] == '' or redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return -1
end
local now = clock_ms()
local ends = string.format(' %.0f ', now + tonumber(ARGV[2]))
redis.call('SET', KEYS[3], ARGV[3] .. ',"at_ms":' .. string.format('%.3f', now) .. '}', 'PX', ARGV[2])
for i = 4, #ARGV, 4 do
  local record = redis.pcall('HGET', KEYS[2], ARGV[i])
  if type(record) == 'string' then
    local said = string.match(record, '^%S+ %S+ %S+ %S+ %S+')
    if said then
      redis.call('HSET', KEYS[2], ARGV[i],
        said .. ends .. ARGV[i + 1] .. ' ' .. ARGV[i + 2] .. ' ' .. ARGV[i + 3])
    end
  end
end
return 1
