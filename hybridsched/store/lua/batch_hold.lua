-- What the holder of a chunk does with it: renew the lease, acknowledge the chunk, or give it back.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash chunk number -> JSON
-- ARGV[1] beat, complete or release   ARGV[2] chunk number   ARGV[3] fence   ARGV[4] lease in ms (beat)
-- ARGV[5] lines done   ARGV[6] lines failed   ARGV[7] output tokens (complete)
--
-- Returns {1 or 0, stop}: 0 when the fence is not the newest, that is, the chunk was lost; nothing is changed
-- then. stop: '' or why the batch is being ended. A lease that is over but was given to nobody else still counts.
--@include clock
--@include chunk
--@include parts
local text = redis.call('HGET', KEYS[2], ARGV[2])
local stop = redis.call('HGET', KEYS[1], 'stop') or 'batch_unknown'
if not text then
  return {0, stop}
end
local chunk = chunk_of(text)
if not chunk or chunk.state ~= 'leased' or chunk.fence ~= tonumber(ARGV[3]) then
  return {0, stop}
end
local now = math.floor(clock_ms())
-- Given back before its journal was read, a chunk has lines that its holder knows nothing of.
if ARGV[1] ~= 'release' or tonumber(ARGV[5]) + tonumber(ARGV[6]) > 0 then
  chunk.done = tonumber(ARGV[5])
  chunk.failed = tonumber(ARGV[6])
end
if ARGV[1] == 'beat' then
  chunk.lease_ms = now + tonumber(ARGV[4])
elseif ARGV[1] == 'complete' then
  chunk.state = 'done'
  chunk.lease_ms = 0
  redis.call('HINCRBY', KEYS[1], 'done', chunk.done)
  redis.call('HINCRBY', KEYS[1], 'failed', chunk.failed)
  redis.call('HINCRBY', KEYS[1], 'output_tokens', ARGV[7])
  redis.call('HINCRBY', KEYS[1], 'outstanding', -1)
  local parts = parts_of(redis.call('HGET', KEYS[1], 'parts'))
  if parts and #parts > 0 then
    local part = parts[tonumber(ARGV[2]) % #parts + 1]
    part.outstanding = part.outstanding - 1
    part.ended = part.ended + chunk.done + chunk.failed
    redis.call('HSET', KEYS[1], 'parts', cjson.encode(parts))
  end
  redis.call('HDEL', KEYS[1], 'wait_code', 'wait_message', 'wait_ms', 'wait_seen_ms')
else
  chunk.state = 'queued'
  chunk.owner = ''
  chunk.lease_ms = 0
  chunk.queued_ms = now
end
redis.call('HSET', KEYS[2], ARGV[2], cjson.encode(chunk))
return {1, stop}
