-- Take a chunk: a lease by the server's clock, with a fence that no earlier or later claim has.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash chunk number -> JSON
-- ARGV[1] chunk number   ARGV[2] owner   ARGV[3] lease in ms   ARGV[4] the owner's model, '' for any
--
-- Returns the chunk's JSON with its new fence, or one of the words
-- unknown (no such batch or chunk), stopped (the batch takes no more work), done, taken (a live lease of another),
-- damaged (what stands there is no chunk), other (its part of the batch is another model's).
--@include clock
--@include chunk
--@include parts
local batch = redis.call('HMGET', KEYS[1], 'status', 'stop', 'parts')
local text = redis.call('HGET', KEYS[2], ARGV[1])
if not batch[1] or not text then
  return 'unknown'
end
if batch[1] ~= 'in_progress' or batch[2] ~= '' then
  return 'stopped'
end
local chunk = chunk_of(text)
if not chunk then
  return 'damaged'
end
local parts = parts_of(batch[3])
if parts then
  if #parts == 0 then
    return 'damaged'
  end
  if ARGV[4] ~= '' and parts[tonumber(ARGV[1]) % #parts + 1].model ~= ARGV[4] then
    return 'other'
  end
end
local now = math.floor(clock_ms())
if chunk.state == 'done' then
  return 'done'
end
if chunk.state == 'leased' then
  if chunk.lease_ms > now then
    return 'taken'
  end
  chunk.attempts = chunk.attempts + 1
end
chunk.state = 'leased'
chunk.owner = ARGV[2]
chunk.lease_ms = now + tonumber(ARGV[3])
chunk.fence = redis.call('HINCRBY', KEYS[1], 'fence', 1)
text = cjson.encode(chunk)
redis.call('HSET', KEYS[2], ARGV[1], text)
return text
