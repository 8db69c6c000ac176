-- Look over one batch: a deadline that has passed, leases that have expired, chunks that wait too long.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash chunk number -> JSON
-- ARGV[1] ms after which a queued chunk may have lost its job
--
-- Returns {expired, reclaimed, waiting, damaged}: 1 when the deadline has just been found passed; numbers of chunks whose
-- lease had expired and that are queued again; numbers of chunks queued for longer than ARGV[1], whose job the
-- caller should look for (a chunk is named once per ARGV[1]); 1 when a planned chunk cannot be read any more.
-- Fields that are no chunk that was planned are removed.
--@include clock
--@include chunk
local batch = redis.call('HMGET', KEYS[1], 'status', 'stop', 'deadline_ms', 'next_chunk')
local expired, reclaimed, waiting, damaged = 0, {}, {}, 0
if batch[1] ~= 'validating' and batch[1] ~= 'in_progress' then
  return {expired, reclaimed, waiting, damaged}
end
local now = math.floor(clock_ms())
if batch[3] ~= '' and tonumber(batch[3]) <= now then
  redis.call('HSET', KEYS[1], 'stop', 'batch_expired', 'status', 'finalizing')
  return {1, reclaimed, waiting, damaged}
end
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local number = string.find(all[i], '^%d+$') and tonumber(all[i])
  local chunk = chunk_of(all[i + 1])
  local list
  if not number or number >= tonumber(batch[4]) then
    redis.call('HDEL', KEYS[2], all[i])
  elseif not chunk then
    damaged = 1
  elseif chunk.state == 'leased' and chunk.lease_ms <= now then
    list = reclaimed
    chunk.attempts = chunk.attempts + 1
    chunk.state = 'queued'
    chunk.owner = ''
    chunk.lease_ms = 0
  elseif chunk.state == 'queued' and now - chunk.queued_ms >= tonumber(ARGV[1]) then
    list = waiting
  end
  if list then
    chunk.queued_ms = now
    table.insert(list, number)
    redis.call('HSET', KEYS[2], all[i], cjson.encode(chunk))
  end
end
table.sort(reclaimed)
table.sort(waiting)
return {expired, reclaimed, waiting, damaged}
