-- Put the next chunk of a batch into its ledger and move the cursor past it, if nobody else has. Of a batch with parts
-- it is the cursor of one part, and its chunks that count.
--
-- KEYS[1] batch:{id}  hash     KEYS[2] batch:{id}:chunks  hash chunk number -> JSON
-- ARGV[1] cursor that the caller cut the chunk at (byte offset)
-- ARGV[2] most chunks that may be outstanding (planned and not done)
-- ARGV[3] end  ARGV[4] first_line  ARGV[5] lines  ARGV[6] tokens  ARGV[7] next_line  ARGV[8] 1 at the end of input
-- ARGV[9] skip  ARGV[10] place of the part, '' where the batch has none
--
-- Returns the chunk's number, or -1 the cursor has moved, -2 enough is outstanding, -3 the batch takes no chunks.
--@include clock
--@include parts
local batch = redis.call('HMGET', KEYS[1], 'status', 'stop', 'cursor', 'next_chunk', 'outstanding', 'at_end', 'parts')
if not batch[1] or (batch[1] ~= 'validating' and batch[1] ~= 'in_progress') or batch[2] ~= '' or batch[6] == '1' then
  return -3
end
local parts = parts_of(batch[7])
local part
if parts or ARGV[10] ~= '' then
  part = parts and ARGV[10] ~= '' and parts[tonumber(ARGV[10]) + 1]
  if not part or part.at_end then
    return -3
  end
end
if part and part.cursor ~= tonumber(ARGV[1]) or not part and batch[3] ~= ARGV[1] then
  return -1
end
if (part and part.outstanding or tonumber(batch[5])) >= tonumber(ARGV[2]) then
  return -2
end
local now = math.floor(clock_ms())
local number = part and part.next_chunk or tonumber(batch[4])
redis.call('HSET', KEYS[2], number, cjson.encode({
  start = tonumber(ARGV[1]), ['end'] = tonumber(ARGV[3]), first_line = tonumber(ARGV[4]),
  lines = tonumber(ARGV[5]), tokens = tonumber(ARGV[6]), next_line = tonumber(ARGV[7]),
  at_end = ARGV[8] == '1', state = 'queued', owner = '', lease_ms = 0, fence = 0,
  done = 0, failed = 0, attempts = 0, queued_ms = now, skip = tonumber(ARGV[9]),
}))
if part then
  part.cursor, part.cursor_line = tonumber(ARGV[3]), tonumber(ARGV[7])
  part.next_chunk = number + #parts
  part.outstanding = part.outstanding + 1
  part.at_end = ARGV[8] == '1'
  local first, at_end = part, '1'
  for _, other in ipairs(parts) do
    first = other.cursor < first.cursor and other or first
    at_end = other.at_end and at_end or '0'
  end
  redis.call('HSET', KEYS[1], 'status', 'in_progress', 'parts', cjson.encode(parts),
    'cursor', string.format('%d', first.cursor), 'cursor_line', string.format('%d', first.cursor_line),
    'next_chunk', math.max(tonumber(batch[4]), number + 1), 'at_end', at_end)
else
  redis.call('HSET', KEYS[1], 'status', 'in_progress', 'cursor', ARGV[3], 'cursor_line', ARGV[7],
    'next_chunk', number + 1, 'at_end', ARGV[8])
end
redis.call('HSETNX', KEYS[1], 'started_ms', string.format('%d', now))
redis.call('HINCRBY', KEYS[1], 'outstanding', 1)
return number
